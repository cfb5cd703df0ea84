"""Running ahead where steps are captured graphs: drafts are greedy whatever was drafted ahead, branches included."""

import pytest
import torch

from ahead_kit import Interplay
from specdec.draft.model.steps import GraphSteps
from test_causal import CONFIGS, save

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class OnTheGpu(Interplay):
    """Sums in another order may turn a near-tie: a draft must be as likely as the likeliest, or almost."""

    branched = 0

    @torch.inference_mode()
    def check(self, session, ids, k, plain):
        assert len(ids) == len(plain) == k
        logits = self.model(torch.tensor([[*session.tokens, *ids]])).logits[0, len(session.tokens) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen < 1e-2).all()
        self.branched += len(self.drafter._lines[session].lines) > 1


@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_greedy_whatever_was_drafted_ahead(tmp_path, seed):
    model = save(tmp_path, CONFIGS["llama with biases"])
    play = OnTheGpu(model, tmp_path, seed, device="cuda", max_batch=4)
    assert isinstance(play.drafter._steps, GraphSteps)
    play.run(60)
    assert play.drafter.ahead_counts.hits > 5
    assert play.branched > 5
