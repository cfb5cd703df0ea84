"""Running ahead where steps are captured graphs: the main line."""

import pytest
import torch

from ahead_kit import Interplay
from test_causal import CONFIGS, save

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class OnTheGpu(Interplay):
    """Sums in another order may turn a near-tie: a draft must be as likely as the likeliest, or almost."""

    @torch.inference_mode()
    def check(self, session, ids, k, plain):
        assert len(ids) == len(plain) == k
        logits = self.model(torch.tensor([[*session.tokens, *ids]])).logits[0, len(session.tokens) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen < 1e-2).all()


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_greedy_whatever_was_drafted_ahead(tmp_path, seed):
    model = save(tmp_path, CONFIGS["llama"])
    play = OnTheGpu(model, tmp_path, seed, device="cuda", max_batch=4)
    play.run(60)
    assert play.drafter.ahead_counts.hits > 5
