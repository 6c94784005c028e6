"""Definitions of models that diffusers does not have, one file a family, written from public architecture facts.

They exist to be traced and to train small copies: module names, parameter counts and every tensor that autograd saves are
those of the model as it is trained. They are no inference code; weights of the original are not converted.
"""
