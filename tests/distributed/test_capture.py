"""Steps of several processes that are captured equal those that are launched one by one."""

import pytest
import torch
from torch_geometric.data import Data

import pyg_dfgnn.nn
from pyg_dfgnn import models
from pyg_dfgnn.capture import CapturedStep, Recorder
from pyg_dfgnn.distributed import Group, own_part, wrap
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.training.step import make_step
from tests.capture.test_step import HostRecorder
from tests.distributed.test_partition import CLASSES, FEATURES, graph


def compare(device):
    group = Group.of_environment(device)
    edge_index, x, _, y = graph()
    batch = own_part(Data(x=x.float(), edge_index=edge_index, y=y), group)
    for name in ("GraphTransformer", "GAT"):
        losses = []
        for captured in (False, True):
            torch.manual_seed(1)
            options = {"hidden_channels": 8, "heads": 2, "layers": 2, "dropout": 0.0}
            options |= {"pe_size": 0} if name == "GraphTransformer" else {}
            model = getattr(models, name)(FEATURES, CLASSES, pyg_dfgnn.nn, **options).to(group.device)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
            recorder = None
            if captured:
                recorder = Recorder(group.device) if device == "cuda" else HostRecorder(optimizer)
            stream = recorder.stream if device == "cuda" and captured else None
            options = {"loss_weights": True, "group": group, "captured": captured, "recorder": recorder}
            step = make_step(wrap(model, group, stream), optimizer, batch, **options)
            losses.append(torch.stack([step(batch) for _ in range(CapturedStep.SHARED_WARM_UPS + 6)]))
            model.eval()
            losses.append(torch.stack([step.evaluate(batch) for _ in range(CapturedStep.SHARED_WARM_UPS + 2)]))
        torch.testing.assert_close(losses[2], losses[0], **elementwise("float32"), msg=name)
        torch.testing.assert_close(losses[3], losses[1], **elementwise("float32"), msg=name)
        assert losses[0][-1] < losses[0][0]
        assert all(capture.recording is not None for capture in step._captures.values()) and len(step._captures) == 2
        assert group.gather(losses[2].view(1, -1)).unique(dim=0).size(0) == 1


def test_equals_single_launches(launch):
    launch(2, compare, "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_equals_single_launches_on_gpus(launch):
    launch(2, compare, "cuda", start_method="spawn")
