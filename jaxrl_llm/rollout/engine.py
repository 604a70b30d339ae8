"""Engine specs: an engine before it is built, with everything that a run needs to know about it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import jax

from jaxrl_llm.core.net.registry import Registry
from jaxrl_llm.models.spec import LoraConfig, ModelSpec
from jaxrl_llm.rollout.api import Engine, Sampling
from jaxrl_llm.tasks.tokenizer import Tokenizer

Run = Callable[..., Awaitable[Any]]
"""Awaits `function(*args, **kwargs)` on the device thread of the trainer's process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSetting:
  """Settings of the run available to an engine besides its options."""

  spec: ModelSpec
  """Architecture of the policy."""
  dtype: str
  """Data type of the policy's computation."""
  param_dtype: str
  """Data type of the policy's parameters."""
  lora: LoraConfig | None
  """Adapters that the policy trains; None: the whole model."""
  max_length: int
  """Length of the longest sequence in tokens, prompt included."""
  seed: int
  """Seed of all sampling."""
  tokenizer: Tokenizer
  """Tokenizer of the policy."""
  text: str
  """One of the run's prompts as text, for comparing tokenizers; '': the run has no tasks."""
  workdir: pathlib.Path
  """Run directory, for logs and files of servers."""
  registry: Registry | None = None
  """Registry of the run; None: it has none."""
  on_server: Callable[[str, str], None] = lambda name, how: None
  """Called with the name of a server that joins or leaves while the run goes on, and how."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpec:
  """An engine with its options, before it is built."""

  build: Callable[[EngineSetting, Run], Engine]
  """Returns the engine, not started, in process 0 of the trainer."""
  served: bool = False
  """Whether servers outside the trainer's process sample the tokens. Their arithmetic differs from
  the trainer's, so each version is published to them with a probe; an engine in the process runs
  the trainer's own model on its devices.
  """
  adapters: bool = False
  """Whether a LoRA policy is published as base weights once and then adapters alone; False: always
  merged.
  """
  addresses: tuple[str, ...] = ()
  """Running servers that the engine attaches to (its option `addresses`); empty: it starts its own,
  or needs none. The run owns their weights, so programs that reopen a run must not load other
  weights into these servers.
  """
  may_change: tuple[str, ...] = ()
  """Names of options that a resumed run may change: number, place and deadlines of servers, not
  what they sample.
  """
  unsupported: Callable[[Sampling], str | None] = lambda sampling: None
  """Returns why the engine cannot sample with these parameters; None if it can. It can always
  sample greedily.
  """
  programs: Callable[[EngineSetting, jax.Device], Iterable[tuple[str, jax.stages.Lowered]]] = (
    lambda setting, device: ()
  )
  """Returns named programs compiled for one device, for the memory table of `--dry_run`."""
  commands: Callable[[EngineSetting], Mapping[str, str]] = lambda setting: {}
  """Returns shell commands of its servers, keyed by server name, which `--dry_run` prints."""
