"""Counters of an engine."""

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """What an engine has done since it was made, or since its stats were forgotten.

    Tokens of a prompt count once, however many samples it has.
    """

    prefill_steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    """Computed in prefill steps: prompts, targets, and what preemptions made necessary again."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    output_tokens: int = 0
    forced_tokens: int = 0
    """Output tokens that grammars left no choice for, and that were computed without a decode step."""
    masks: int = 0
    """Token masks that were made: one for each token drawn under a grammar."""
    discarded_tokens: int = 0
    """Drawn past the end of an answer, because the end was seen one step late."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Of those computed, the ones that had been before: for preempted sequences, and for samples that came later."""
    split_steps: int = 0
    """Steps that were computed in two halves, because the GPU had no memory for the whole."""
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    """On a CPU the whole computation, on a GPU the launch alone, with the capture of graphs."""
    mask_seconds: float = 0.0
    wait_seconds: float = 0.0
    collect_seconds: float = 0.0
    graphs: int = 0
    """CUDA graphs that were captured."""
    graph_seconds: float = 0.0

    @property
    def host_seconds(self) -> float:
        """Time in which the host was busy; on a GPU it is hidden as long as it is shorter than the steps."""
        return self.schedule_seconds + self.launch_seconds + self.mask_seconds + self.collect_seconds
