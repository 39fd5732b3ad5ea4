"""The settings: one frozen pydantic tree, which is one TOML file. No torch.

Every field's description is its documentation (`docs/settings.md` is generated from here). Checks that need more than one field
live in `checks.py`; files, overlays and command-line overrides in `load.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of every table: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class RunSettings(Settings):
    name: str = Field(default="run", description="Name of the run; the folder is runs/<name>-<date>-<time>.", pattern=r"^[A-Za-z0-9._-]+$")
    folder: str | None = Field(default=None, description="The run folder itself, instead of the one derived from the name.")
    seed: int = Field(default=0, ge=0, description="Seed of the prompt order, the sampling and everything else that is drawn.")
    deterministic: bool = Field(
        default=False, description="The whole run is a function of file, seed and numerics fingerprint; launch = 'inline' only."
    )
    stop_grace_s: float = Field(
        default=5.0, ge=0, description="After the first Ctrl-C, how long running sequences may go on before they are saved."
    )


class ModelSettings(Settings):
    name: str = Field(default="builtin:tiny", description="Hugging Face id, folder, GGUF file, or builtin:tiny.")
    revision: str | None = Field(default=None, description="Revision of a Hugging Face id.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Dtype the engine computes in; bfloat16 training keeps float32 master weights."
    )
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto | cpu | cuda[:n] | mps, for every role that sets none."
    )
    chat_template: str | None = Field(default=None, description="Jinja chat template (text or file) instead of the tokenizer's own.")


class DataSettings(Settings):
    train: str = Field(
        default="builtin:sort_digits", description="JSONL or parquet file, folder, id:config:split, reasoning_gym:NAME, or builtin:NAME."
    )
    eval: str | Annotated[int, Field(ge=1, strict=True)] | None = Field(
        default=None,
        description="Like train (of a source with several parts, the held-out one); or a number: hold out that many distinct prompts of "
        "train; or nothing.",
    )
    prompt_template: str | list[dict[str, str]] | None = Field(
        default=None, description="str.format text over the row's columns for the user message, or a list of chat messages with such texts."
    )
    system_prompt: str | None = Field(default=None, description="A system message put first.")
    columns: dict[str, str] = Field(default={}, description="New column name = existing column, e.g. {prompt = 'question'}.")
    options: dict[str, Any] = Field(default={}, description="Arguments of the source (reasoning_gym: those of create_dataset).")
    limit: int | None = Field(default=None, ge=1, description="Use only the first rows of train.")


class RewardSettings(Settings):
    function: str = Field(description="exact | number | regex, 'package.module:function', or 'file.py:function' beside the run file.")
    name: str | None = Field(default=None, description="Name in the metrics; the function's name by default.")
    weight: float = Field(default=1.0, description="Its share of the reward: the weighted sum of the applicable scores.")
    timeout_s: float = Field(default=30.0, gt=0, description="Deadline for one group; past it the group is recorded as failed.")
    options: dict[str, Any] = Field(default={}, description="Keyword arguments passed on to the function.")


class RolloutSettings(Settings):
    group_size: int = Field(default=8, ge=1, description="G: rollouts per prompt.")
    max_new_tokens: int = Field(default=128, ge=1, description="Tokens sampled per turn at most.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    top_k: int = Field(default=0, ge=0, description="Refused for training: the trainer would need the kept vocabulary.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Refused for training below 1.")
    min_p: float = Field(default=0.0, ge=0, lt=1, description="Refused for training above 0.")
    stop: list[str] = Field(default=[], description="Strings that end a completion (they stay in it).")
    interrupt: Literal["in_flight"] = Field(default="in_flight", description="What a weight update does to a running generation.")
    environment: Literal["single_turn", "tools"] = Field(default="single_turn", description="What a rollout talks to.")
    tools: list[str] = Field(default=[], description="'module:function' or 'file.py:function' of each tool (environment = 'tools').")
    tool_timeout_s: float = Field(default=10.0, gt=0, description="Deadline of one tool call.")
    max_turns: int = Field(default=1, ge=1, description="Turns of the model per rollout at most.")
    timeout_s: float = Field(default=600.0, gt=0, description="Deadline of one rollout; past it the rollout is recorded as failed.")
    max_attempts: int = Field(default=2, ge=1, description="How often a group is tried before it is dropped.")


class EngineSettings(Settings):
    type: Literal["embedded"] = Field(default="embedded", description="What generates tokens.")
    slots: int = Field(default=32, ge=1, description="Sequences that generate at the same time.")
    max_context: int | None = Field(
        default=None, ge=16, description="Longest prompt + completion in tokens; the model's own limit (at most 4096) by default."
    )
    threads: int = Field(default=1, ge=1, description="CPU threads; with more than 1 a row's result may depend on its neighbours.")
    device: str | None = Field(default=None, pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="Instead of model.device.")


class BufferSettings(Settings):
    max_staleness: int = Field(
        default=1, ge=0, description="S: admission keeps (S+1) x groups_per_step groups in flight; 0 is synchronous."
    )
    window: int | None = Field(
        default=None,
        ge=1,
        description="W: places from the oldest unpulled group that may be pulled out of order; max(1, 0.3 (S+1) P) by default, 1 is fifo.",
    )
    on_stale: Literal["mask_tokens", "keep"] = Field(
        default="mask_tokens",
        description="Tokens older than max_staleness (possible only with window > 1): masked from the loss, or kept; counted either way.",
    )
    filter_zero_variance: bool = Field(
        default=False, description="Groups whose rewards are all equal are filtered and another prompt takes the place."
    )
    max_barren_groups: int = Field(default=64, ge=1, description="The run ends when this many groups in a row failed or were filtered.")


class TrainerSettings(Settings):
    steps: int = Field(default=100, ge=1, description="Optimizer steps; a larger number extends a finished run at --resume.")
    groups_per_step: int = Field(default=4, ge=1, description="P: groups per optimizer step.")
    learning_rate: float = Field(default=1e-5, ge=0, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(default=0, ge=0, description="Linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="After the warm-up; linear and cosine reach 0 at trainer.steps."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay (matrices only).")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW betas.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradient clipping.")
    max_tokens_per_micro_batch: int = Field(
        default=8192, ge=16, description="Packed tokens per forward and backward pass; a batch is split to fit."
    )
    logprob_chunk_tokens: int = Field(default=1024, ge=16, description="Rows of logits held at once in the output head.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass.")
    max_skipped_steps: int = Field(
        default=5, ge=1, description="The run ends after this many skipped updates in a row (non-finite loss or gradient)."
    )
    step_timeout_s: float = Field(default=1800.0, gt=0, description="A step that takes longer is a hang.")
    threads: int = Field(default=1, ge=1, description="CPU threads.")
    device: str | None = Field(default=None, pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="Instead of model.device.")


class LossSettings(Settings):
    preset: Literal["grpo", "dr_grpo", "dapo"] = Field(
        default="grpo", description="Sets advantage, clipping and aggregation at once; the keys below override."
    )
    clip_low: float | None = Field(default=None, gt=0, description="Lower clip range of the ratio; the preset's by default.")
    clip_high: float | None = Field(default=None, gt=0, description="Upper clip range of the ratio; the preset's by default.")


class WeightSyncSettings(Settings):
    transport: Literal["shared_memory"] = Field(
        default="shared_memory", description="How weights travel; launch = 'inline' uses the same slots in one process."
    )
    payload: Literal["full"] = Field(default="full", description="What travels.")
    every: Literal[1] = Field(default=1, description="Steps between two published versions.")
    lag: int | None = Field(
        default=None,
        ge=0,
        description="launch = 'inline' only: batch s is sampled with version max(0, s - lag) and no other; needs max_staleness = lag.",
    )


class CheckpointSettings(Settings):
    every: int = Field(default=50, ge=1, description="Steps between checkpoints; the last step always makes one.")
    keep: int = Field(default=2, ge=1, description="Checkpoints kept; group data is kept until the oldest of them covers it.")


class EvaluationSettings(Settings):
    every: int = Field(default=25, ge=1, description="Steps between evaluations; version 0 and the last are always evaluated.")
    samples: int = Field(default=1, ge=1, description="Completions per evaluation prompt.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    limit: int | None = Field(default=None, ge=1, description="Use only the first evaluation rows.")
    timeout_s: float = Field(default=600.0, gt=0, description="An evaluation that takes longer is ended and counted as failed.")


class MetricsSettings(Settings):
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default=[], description="Besides metrics.jsonl, which is always written."
    )
    samples_per_step: int = Field(default=2, ge=0, description="Rollouts of every step written to samples.jsonl.")


class LedgerSettings(Settings):
    keep: Literal["window", "all"] = Field(
        default="window", description="Group data until the oldest checkpoint covers it, or for good (replay)."
    )


class Config(Settings):
    """A whole run."""

    launch: Literal["inline", "local"] = Field(
        default="local", description="inline: one process, for tests, debuggers and Macs. local: a process per role."
    )
    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    reward: list[RewardSettings] = Field(default=[], description="One table per reward.")
    rollout: RolloutSettings = RolloutSettings()
    engine: EngineSettings = EngineSettings()
    buffer: BufferSettings = BufferSettings()
    trainer: TrainerSettings = TrainerSettings()
    loss: LossSettings = LossSettings()
    weight_sync: WeightSyncSettings = WeightSyncSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    metrics: MetricsSettings = MetricsSettings()
    ledger: LedgerSettings = LedgerSettings()
