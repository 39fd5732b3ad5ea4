"""A model sharded over two ranks (FSDP2, gloo): gathered tensor by tensor for every way to send them, in step with nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

RANK = """
import json, sys, threading, weakref
from pathlib import Path
import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from slipstream.protocols import WeightsOffer
from slipstream.types import encode
from slipstream.weight_sync.block import lend_shards
from slipstream.weight_sync.collective import CollectivePublisher, CollectiveWeights
from slipstream.weight_sync.delta import DeltaPublisher, memory_delta_weights
from slipstream.weight_sync.delta_files import FileDeltaPublisher, file_delta_weights
from slipstream.weight_sync.files import FilePublisher, FileWeights
from slipstream.weight_sync.memory import MemoryFile
from slipstream.weight_sync.packing import WeightLayout, checksum
from slipstream.weight_sync.weight_directory import WeightDirectory

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/default", rank=rank, world_size=2)

class Model(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 300)
        self.one = nn.Linear(300, 1, bias=False)  # no row of it for the second rank
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("router_bias", torch.arange(3.0))

reference, model, engine = Model(0), Model(0), Model(1).bfloat16()
engine.router_bias = engine.router_bias.float()
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
layout = WeightLayout.of(model, torch.bfloat16)
assert encode(layout.manifest(1, 0, "")) == encode(WeightLayout.of(reference, torch.bfloat16).manifest(1, 0, ""))
assert layout.aliases == {"head.weight": "embed.weight"}

gathered, alive = [], [0]
full_tensor = DTensor.full_tensor
def watched(self, **more):
    alive.append(sum(whole() is not None for whole in gathered))
    whole = full_tensor(self, **more)
    gathered.append(weakref.ref(whole))
    return whole
DTensor.full_tensor = watched

def train_step():
    with torch.no_grad():
        for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
            sharded.mul_(-1.5)
            whole.mul_(-1.5)

events, seen = [], []
if rank == 0:
    publisher = CollectivePublisher(model, folder, 3, torch.bfloat16, bucket_bytes=512)
    weights = CollectiveWeights(engine, folder, "engine-0", bucket_bytes=512)
    send = publisher._while_held
    publisher._while_held = lambda ask, block: (events.append(f"send {ask.version}"), send(ask, block))[1]
fetching = None
for version in range(4):
    train_step()
    if rank == 0:
        manifest = publisher.pack(version % 3, 1, version)
        events.append(f"packed {version}")
        assert manifest.checksum == checksum(reference, torch.bfloat16)
        if fetching is not None:
            fetching.join()
        offer = WeightsOffer(slot=version % 3, manifest=manifest)
        fetching = threading.Thread(target=lambda offer=offer: seen.append(weights(offer)))
        fetching.start()  # beside the next version's gathering
    else:
        lend_shards(layout, model)
if rank == 0:
    fetching.join()
    assert seen[-1] == checksum(engine) == manifest.checksum and len(set(seen)) == 4
    weights.close()
    publisher.close()
slots = [MemoryFile.create("slot")]
directories = [WeightDirectory(Path(folder) / name, "run-a") for name in ("files", "changes")]
others = [
    (lambda: DeltaPublisher(model, slots, torch.bfloat16), lambda: memory_delta_weights(engine, slots)),
    (lambda: FilePublisher(model, directories[0], 3, torch.bfloat16), lambda: FileWeights(engine, directories[0])),
    (lambda: FileDeltaPublisher(model, directories[1], 3, torch.bfloat16), lambda: file_delta_weights(engine, directories[1])),
]
if rank == 0:
    for directory in directories:
        directory.prepare()
for make_publisher, make_weights in others:
    if rank == 0:
        publisher, weights = make_publisher(), make_weights()
    for version in range(2):
        train_step()
        if rank == 0:
            manifest = publisher.pack(0, 1, version)
            assert weights(WeightsOffer(slot=0, manifest=manifest)) == checksum(reference, torch.bfloat16) == checksum(engine)
        else:
            lend_shards(layout, model)
if rank == 0:
    print(json.dumps({"events": events, "alive": max(alive), "gathered": len(gathered)}))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_gather_whole_tensors_for_every_way_to_send_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        (out, errors), (_, others) = (rank.communicate(timeout=200) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors + others
    told = json.loads(out)
    for version in range(4):
        assert told["events"].index(f"send {version}") > told["events"].index(f"packed {version}")
    assert told["gathered"] == (4 + 3 * 2) * 4 and told["alive"] == 0, "more than one whole tensor at a time"
