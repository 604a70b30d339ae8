"""Chat SFT of a checkpoint on conversations.

The rows of the file are conversations (`messages`, with system prompts, several turns and tool
calls), prompts with completions, or texts. The loss covers the assistant's turns. One fifth of the
prompts are held out, and evaluations measure the loss on them (`val-core/held_out/sft_loss`).

Command:   python launch/train.py --config=configs/sft.py:ROWS.jsonl --config.policy.init_from=DIR
           python docs/start/chat_sft.py makes rows and a tiny checkpoint, trains and chats.
Hardware:  a laptop's CPU for the tiny checkpoint.
Result:    docs/guides/sft.md. Not run at size; for a larger model, raise lengths, batch size and
           steps.
"""

from jaxrl_llm.api import (
  AlgorithmConfig,
  CheckpointConfig,
  Config,
  Examples,
  ExamplesConfig,
  LearnerConfig,
  OptimizerConfig,
  PolicyConfig,
  RolloutConfig,
  StageConfig,
)


def get_config(source: str = 'chat.jsonl') -> Config:
  def rows(name, split):
    return ExamplesConfig(name=name, source=source, split=split, holdout=0.2)

  return Config(
    name='sft',
    policy=PolicyConfig(init_from='checkpoint'),
    examples=(rows('chat', 'train'), rows('held_out', 'eval')),
    # A sequence has at most 512 tokens; longer rows are truncated and counted.
    rollout=RolloutConfig(max_prompt_length=256, max_response_length=256),
    learner=LearnerConfig(chunks_per_rank=4),
    stages=(
      StageConfig(
        name='sft',
        algorithm=AlgorithmConfig(name='sft'),
        source=Examples(train='chat', held_out='held_out', sequences_per_batch=16),
        steps=200,
        optimizer=OptimizerConfig(peak_lr=3e-3, schedule='linear'),
        evaluate_every=50,
      ),
    ),
    checkpoint=CheckpointConfig(every_steps=50),
    compilation_cache='runs/.compilation_cache',
  )
