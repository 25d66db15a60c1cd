"""What a reduced precision costs: mean negative log-likelihood on one fixed text.

The text is ours, has names, numbers, a list and a dialogue, and is never shown to anybody. Likelihood is
the right judge here: greedy texts differ at the first near-tie without being any worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.model import LoadedModel
from engine.runner import Row, Runner
from kernels.api import AttentionBackend

TEXT = """\
The harbour light at Tolven was lit for the first time on 14 October 1871, three weeks later than
planned, because the lens had been packed in the wrong crate and sent to another town. For the next
ninety years somebody climbed its 112 steps every evening. The last keeper, Marta Wells, left a notebook
in which she wrote down the weather, the ships she recognised and, now and then, what she thought of
them.

Her instructions for whoever came after her are short:

1. Clean the glass before dusk, never after. Salt that has dried in the lamp's heat does not come off.
2. Wind the clockwork at eight, at midnight and at four. It runs for five hours, but do not rely on it.
3. If the fog signal fails, ring the bell once every thirty seconds and write down when you started.
4. Do not argue with captains. They are usually wrong, but they are always wet and tired.

In 1963 the light was connected to the electricity network and the clockwork was taken to a museum,
where it can still be seen. The motor that replaced it needed less attention, used about 250 watts and
broke down more often. When it did, the engineer had to come from the mainland, a journey of two hours
in good weather.

"How long has it been dark?" he would ask.

"Since Tuesday," they would answer, "and two boats have already missed the channel."

Today the lamp is a small panel of diodes that draws less power than a kettle does in standby. It is
checked by a computer in an office 300 kilometres away, which sends a message when the current drops
below a limit. The computer has no opinion about captains. If the temperature in the lamp room rises
above forty degrees, a fan starts; if the fan does not start, a second message is sent. Once a year,
usually in May, two technicians visit the tower, tighten the screws, replace the batteries and paint
whatever has begun to rust.

The people of the village were asked whether the tower should be sold. A clear majority, 61 percent,
voted against it, although most of them had never been inside. A teacher explained the result to the
newspaper in this way: a light that nobody needs is still a light, and from the sea you can see that
somebody is at home. The council therefore decided to keep the building, to open it to visitors on
Sundays between ten and four, and to charge two euros for the climb. Children under twelve, and anybody
who can show that they have rowed there, are admitted free of charge.
"""


def token_ids(tokenizer: Any, limit: int) -> list[int]:
    """The text's first `limit` tokens, without special ones."""
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)
    return ids[:limit]


def likelihood(
    model: LoadedModel, backend: AttentionBackend, block_size: int, tokens: Sequence[int], chunk: int = 256
) -> float:
    """Mean negative log-likelihood (nats a token) of `tokens` by `model.decoder`, through pages.

    The chunk's length stays the same in every comparison, so that only the precision differs.
    """
    blocks = -(-len(tokens) // block_size)
    pool = model.new_pool(blocks, block_size)
    runner = Runner(model, pool, backend)
    total = 0.0
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        row = Row(0, part, start, range(blocks), 0, False)
        output, _ = runner.forward([row], np.arange(len(part), dtype=np.int64))
        follow = torch.tensor(tokens[start + 1 : start + len(part) + 1], device=model.device)
        table = output.logits[: len(follow)].float().log_softmax(dim=-1)
        total -= float(table.gather(1, follow[:, None]).sum())
    return total / (len(tokens) - 1)
