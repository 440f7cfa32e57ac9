"""Ranks get the classes of a notebook; progress is one live line; a failure and an interrupt are short messages."""

import re
import textwrap

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

DEFINITIONS = """
import os, signal, torch
from torch.utils.data import Dataset
from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy

class Points(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        x = torch.tensor([index / 32.0])
        return x, 3 * x

class Line(TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(1, 1)
    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Interrupt(Callback):
    pid = os.getpid()
    def on_step_end(self, run):
        if run.is_main and run.state.step == 5:
            os.kill(self.pid, signal.SIGINT)

class Fails(Line):
    def training_step(self, batch):
        raise ValueError("a fault of the step")

def fit(strategy, task, *, resume=None, **settings):
    data = Data(train=Points(), batch_size=8)
    return Trainer(strategy, precision="fp64", loggers=[], **settings).fit(task, data, resume=resume)

LONG = "100000step"

def ranks():
    return DDPStrategy(devices=2, device="cpu")
"""
CELLS = {
    "definitions": DEFINITIONS,
    "fit": """
        tasks = [Line(), Line()]
        for task, strategy in zip(tasks, (ranks(), "single")):
            fit(strategy, task, max_duration="3epoch")
        float((tasks[0].net.weight - tasks[1].net.weight).abs()) < 1e-9
    """,
    "result": 'fit("single", Line(), max_duration="1epoch")',
    "mistake": "mistaken = dict(lodgers=[])\nTrainer(max_duration='1step', **mistaken)",
    "failure": 'fit(ranks(), Fails(), max_duration="3epoch")',
    "interrupt": 'fit(ranks(), Line(), max_duration=LONG, run_dir="run", callbacks=[Checkpoint(), Interrupt()])',
    "interrupt without checkpoints": "fit(ranks(), Line(), max_duration=LONG, callbacks=[Interrupt()])",
    "resume": """
        from trainkit.checkpoint.store import load_from
        step = load_from("run").entry.step
        fit(ranks(), Line(), max_duration=f"{step + 4}step", resume="run", callbacks=[]).steps - step
    """,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the kernel's client
def test_a_notebook_trains_its_own_classes_on_ranks(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with which a kernel does not show what other processes print
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(source)) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=200, allow_errors=True, resources=resources).execute()
    outputs = {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}
    results = {name: [o.data["text/plain"] for o in each if "data" in o] for name, each in outputs.items()}
    errors = {name: [o.traceback for o in each if o.output_type == "error"] for name, each in outputs.items()}
    assert errors["definitions"] == errors["fit"] == errors["resume"] == [], errors
    assert (results["fit"], results["resume"]) == (["True"], ["4"])
    (table,) = [output.data["text/html"] for output in outputs["result"] if "data" in output]
    assert "reached max_duration=1epoch: 4 steps, 1 epochs, 32 samples" in table and "train/loss" in table
    (mistake,) = errors["mistake"]
    title, position, line, message = mistake
    assert title.startswith("Traceback") and "line 2" in position and line.strip().startswith("Trainer(")
    assert "Did you mean 'loggers'?" in message
    ((failure,),) = errors["failure"]
    title, line, message, where, report = failure.splitlines()
    assert title.startswith("Traceback") and "Fails" not in line and message == "ValueError: a fault of the step"
    assert re.fullmatch(r"rank [01], before the first step, Fails.training_step", where)
    assert re.fullmatch(r"report: runs/\S+/report.html", report)
    ((interrupt,),) = errors["interrupt"]
    step = re.search(r"after step ([\d,]+)", interrupt)[1]
    continued = "To continue: Trainer(...).fit(task, data, resume='run')"
    assert interrupt == f"KeyboardInterrupt: interrupted after step {step}. {continued}"
    ((unsaved,),) = errors["interrupt without checkpoints"]
    assert unsaved.endswith("Nothing is saved without the callback Checkpoint.")
    printed = "".join(output.get("text", "") for output in outputs["fit"])
    assert "\x1b" not in printed
    drawn = re.findall(r"\n(\repoch 1/3 .*)\n✓ reached max_duration=3epoch: 12 steps", printed)
    assert len(drawn) == 2, printed  # of a rank, and of the kernel itself
    for states in drawn:
        assert "step 0/12  0%" in states.split("\r")[1] and "step 12/12  100%" in states.split("\r")[-1]
