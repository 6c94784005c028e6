"""What a job needs beside its training step: sampling for validation, and encoding pictures and captions before training.

Each phase is an estimate of its own; peaks of different phases are never added up. GiB are of 2^30 bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decision_rules.support import Executor, as_run, job_semantics
from estimators.calibration import kind as kind_of_job
from estimators.devices import Device
from estimators.estimate import GIB, Estimate, Estimator, Semantics
from estimators.schedule import Schedule
from probes.companions import TEXT, VAE, Companion, Run
from probes.profile import Profile
from probes.structure import Structure
from probes.workload import Workload

if TYPE_CHECKING:
    from advisor.api import Session

VALIDATION, DECODE, VAE_CACHING, TEXT_CACHING = "validation", "validation decode", "vae caching", "text caching"
"""Names of the phases."""


@dataclass(frozen=True)
class Phase:
    """What a phase beside the training step needs. Bytes."""

    name: str
    what: str
    """Its shape, for people."""
    estimate: Estimate

    @property
    def text(self) -> str:
        """For people."""
        e = self.estimate
        parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in e.breakdown.items() if value)
        return (
            f"{self.name}: {self.what}: peak {e.peak / GIB:.2f} GiB allocated, {e.device / GIB:.2f} GiB on the device, "
            f"{'fits' if e.fits else 'does NOT fit'} ({parts}){''.join(f'; {note}' for note in e.notes)}"
        )

    def to_json(self) -> dict[str, Any]:
        entry = self.estimate.to_json()
        kept = (
            "peak_gib",
            "peak_gib_low",
            "peak_gib_high",
            "reserved_gib",
            "device_gib",
            "host_gib",
            "fits",
            "fit_probability",
            "breakdown",
            "notes",
        )
        return {"name": self.name, "what": self.what, **{k: entry[k] for k in kept}}


def asked_phases(
    session: Session, workload: Workload, device: Device, executor: Executor, headroom: int
) -> tuple[tuple[Phase, ...], tuple[str, ...]]:
    """(the phases that were asked about, in the order in which they run; what an answer says about them).

    Raises:
        TraceError, WorkloadError: one of them cannot be traced as asked.
    """
    asked = _Asked(session, as_run(executor, workload), device, executor, headroom)
    found = [*asked.caching(), *asked.validation()]
    return tuple(found), tuple(dict.fromkeys([*asked.kept_notes(), *asked.notes]))


class _Asked:
    """One job's phases, and what is to be said about them."""

    def __init__(self, session: Session, workload: Workload, device: Device, executor: Executor, headroom: int) -> None:
        self.session, self.workload, self.device = session, workload, device
        self.executor, self.headroom = executor, headroom
        self.notes: list[str] = []
        self._sizes = {c.kind: 0 for c, _ in workload.kept_companions}
        for c, size in workload.kept_companions:
            self._sizes[c.kind] += size

    def kept_notes(self) -> list[str]:
        """What `--keep-resident` adds to every peak."""
        kept = self.workload.kept_companions
        if not kept:
            return []
        parts = ", ".join(f"{_kind(c)} {c.name} {size / GIB:.2f} GiB" for c, size in kept)
        return [f"kept on the card the whole time: {parts}", *(_source(c) for c, _ in kept)]

    def caching(self) -> list[Phase]:
        """The encoders' peaks. The denoiser is taken not to be loaded yet."""
        w = self.workload
        if not w.caching:
            return []
        known, found = w.companions, []
        if w.references:
            self.notes.append(
                "caching with reference images: the VAE encodes each by itself; what a text encoder makes of them is not modelled"
            )
        if known.vae is not None:
            run = self._vae_run(known.vae, w.caching_batch, w.height, w.width, w.frames)
            profile = self._profile(run, w)
            what = (
                f"the VAE encodes {_some(w.caching_batch, 'sample')} of {w.bucket} ({_how(run)}); the model is not loaded yet"
                f"{self._beside(TEXT)}"
            )
            found.append(self._alone(VAE_CACHING, what, profile, VAE))
        else:
            self.notes.append(f"caching: the VAE of {w.model} {w.variant} is not known here, so its peak is left out")
        if known.text:
            found.append(self._text(known.text))
        else:
            self.notes.append(
                f"caching: the text encoders of {w.model} {w.variant} are not known here, so their peak is left out"
            )
        return found

    def validation(self) -> list[Phase]:
        """Sampling, and the VAE's decode after it."""
        asked = self.workload.validating
        if asked is None:
            return []
        key, profile, _ = self.session.profile(asked, self.device, self.executor, forward_only=True)
        estimator = Estimator(
            profile,
            self.device,
            job_semantics(self.executor, self.workload),
            headroom=self.headroom,
            replay=self.session.replay(key),
        )
        self.session.keep_replay(key, estimator.replay)
        together = "1 sample" if asked.batch == 1 else f"{asked.batch} samples together"
        left = [k for k in ("VAE", "text encoder") if k.lower().replace(" ", "-") not in self._sizes]
        without = f"; {' and '.join(left)} not in it" if left else ""
        what = f"one forward pass of the model without gradients, {together} of {asked.bucket}{without}"
        found = [Phase(VALIDATION, what, estimator.estimate(Schedule()))]
        if (vae := asked.companions.vae) is not None:
            found.append(self._decode(vae, asked, estimator))
        else:
            self.notes.append(
                f"validation: the VAE of {asked.model} {asked.variant} is not known here, so the peak of its decode is left out"
            )
        return found

    def _decode(self, vae: Companion, asked: Workload, sampling: Estimator) -> Phase:
        """The VAE's decode, everything that the model's forward pass had on the card still there."""
        pictures = -(-asked.batch // 2)
        run = self._vae_run(vae, pictures, asked.height, asked.width, asked.frames, decode=True)
        decoding, model = self._profile(run, asked), sampling.profile
        own = () if VAE in self._sizes else decoding.base_sizes
        profile = dataclasses.replace(
            decoding,
            workload=dataclasses.replace(asked, weights_offload="none", compile="none"),
            base_sizes=(*sampling.weights[0], *own),
            trained_shapes=model.trained_shapes,
            host_weight_bytes=model.host_weight_bytes + sampling.swapped_host_bytes(),
            host_quantized_bytes=model.host_quantized_bytes,
        )
        what = (
            f"the VAE decodes {_some(pictures, 'sample')} of {asked.bucket} ({_how(run)}) with the model and what trains still on the "
            f"card{self._beside(TEXT)}"
        )
        estimator = Estimator(profile, self.device, Semantics(), headroom=self.headroom, kind=_band_of(profile))
        return Phase(DECODE, what, estimator.estimate(Schedule()))

    def _text(self, encoders: tuple[Companion, ...]) -> Phase:
        """All of a family's text encoders on the card, each runs by itself."""
        w = self.workload
        profiles = {c.name: self._profile(self._text_run(c), w) for c in encoders}
        weights = tuple(size for p in profiles.values() for size in p.base_sizes)
        named = " and ".join(f"{c.name} ({c.length(w.text_tokens)} tokens)" for c in encoders)
        several = len(encoders) > 1
        what = f"{named} {'encode' if several else 'encodes'} {_some(w.caching_text_batch, 'caption')}, bf16"
        what += ", one encoder after the other with all on the card" if several else ""
        what += f"; the model is not loaded yet{self._beside(VAE)}"
        self.notes += [_source(c) for c in encoders]
        phases = [
            self._alone(TEXT_CACHING, what, dataclasses.replace(p, base_sizes=weights), TEXT) for p in profiles.values()
        ]
        return max(phases, key=lambda p: p.estimate.peak)

    def _alone(self, name: str, what: str, profile: Profile, kind: str) -> Phase:
        """A phase before the model is loaded; what stays on the card of `kind` is among the profile's weights."""
        kept = self.workload.kept_bytes - self._sizes.get(kind, 0)
        estimator = Estimator(
            profile, self.device, Semantics(), headroom=self.headroom, kept=kept, kind=_band_of(profile)
        )
        return Phase(name, what, estimator.estimate(Schedule()))

    def _vae_run(
        self, vae: Companion, batch: int, height: int, width: int, frames: int, *, decode: bool = False
    ) -> Run:
        w = self.workload
        self.notes += [
            _source(vae),
            "VAE: cuDNN's workspaces are not modelled, they add to its peaks; bands of phases are those of training steps, as no "
            "phase was measured",
        ]
        if not (w.vae_tiling and w.vae_slicing):
            off = [n for n, on in (("tiling", w.vae_tiling), ("slicing", w.vae_slicing)) if not on]
            self.notes.append(
                f"VAE: without {' and '.join(off)} ({', '.join('--vae-' + n for n in off)}); a trainer that has it on needs less"
            )
        return Run(
            vae,
            decode=decode,
            batch=batch,
            height=height,
            width=width,
            frames=frames,
            precision=w.vae_precision,
            tiling=w.vae_tiling,
            slicing=w.vae_slicing,
        )

    def _text_run(self, encoder: Companion) -> Run:
        w = self.workload
        return Run(encoder, batch=w.caching_text_batch, tokens=encoder.length(w.text_tokens))

    def _profile(self, run: Run, workload: Workload) -> Profile:
        """As a job of its own: nothing is swapped, compiled or trained."""
        profile, warnings = self.session.companion(run, workload, self.device)
        self.notes += [*warnings, *profile.notes]
        plain = dataclasses.replace(
            workload, weights_offload="none", compile="none", precision="bf16", adapter="lora", ema=False, accumulate=1
        )
        return dataclasses.replace(profile, workload=plain, structure=Structure(()))

    def _beside(self, kind: str) -> str:
        return f", the {kind.replace('-', ' ').replace('vae', 'VAE')} is kept beside it" if kind in self._sizes else ""


def _band_of(profile: Profile) -> str:
    """The kind of job whose bands count for a VAE or text encoder: those of convolutional models come from UNets' training steps, in which
    what is unsure is the workload, so they say nothing about a VAE."""
    return kind_of_job(profile.workload, convolutional=False)


def _some(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s together"


def _how(run: Run) -> str:
    more = [name for name, on in (("tiled", run.tiling), ("sliced", run.slicing)) if on]
    return ", ".join([run.companion.name, run.precision, *more])


def _source(companion: Companion) -> str:
    return f"{_kind(companion)} {companion.name}: config from {companion.source}"


def _kind(companion: Companion) -> str:
    return "VAE" if companion.kind == VAE else "text encoder"
