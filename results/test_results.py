"""Tests of the scripts in this folder; `python -m pytest -q` in the project's root collects them too."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "results"), str(ROOT)]
import analysis
import baselines
import data
import eval as evaluation
import report
import speed
import train
from etf import simplex_etf
from losses import fnc2_loss, supcon_loss
from model import Encoder, frozen_copy

CPU = torch.device("cpu")
TINY = ("--limit-per-class 12 --width 8 --image-size 8 --batch-size 8 --epochs-first 2 --epochs 2 --dim 16 "
        "--device cpu").split()
KEPT = sorted(path for path in (ROOT / "results").iterdir() if list(path.glob("*-*.json")) and "-12" not in path.name)
close = pytest.approx


@functools.cache
def few_shapes(root):
    """As data.load_shapes, with 20 training and 10 test images of each class."""
    train_y, test_y = (torch.arange(10).repeat_interleave(count) for count in (20, 10))
    return data.draw_shapes(train_y, 0), train_y, data.draw_shapes(test_y, 1), test_y, list(data.SHAPES)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(data.LOADERS, "shapes", few_shapes)
    monkeypatch.setattr(evaluation, "OLD_CROPS", 3)             # quicker
    return tmp_path


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run of five tasks with its results.json."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(data.LOADERS, "shapes", few_shapes)
        train.main([*TINY, "--val-fraction", "0.2", "--zeta-past", "0.5", "--out", str(out)])
        evaluation.main([str(out), "--epochs", "5"])
    return out


# ---------------------------------------------------------------------------- baselines.py

def learner_of(method, buffer=12, **weights):
    """A learner, the images and labels of each task, and the number of views of each forward pass."""
    c = train.parse(f"--width 8 --image-size 8 --buffer {buffer} --batch-size 8 --dim 16 --epochs 3".split())
    d = train.load_data(c, "cpu")
    kind, settings = baselines.METHODS[method]
    learner, sizes = kind(c, {"method": method} | settings | weights, d, CPU), []
    real = learner.logits
    learner.logits = lambda x, net=None: (sizes.append(len(x)), real(x, net))[1]
    return learner, [data.task_images(d, t) for t in range(1, 6)], sizes


first, second = ((lambda task, start=start: [part[start::5] for part in task]) for start in (0, 1))   # 4 + 4 images
stored = lambda learner, column: torch.stack([row[column] for row in learner.memory.rows])


def test_baseline_views_are_padded_crops_and_flips():
    images = torch.randint(1, 256, (50, 3, 16, 16), dtype=torch.uint8)
    views = baselines.crop_flip(images, torch.Generator().manual_seed(0), torch.zeros(3), torch.ones(3)) * 255
    for view, image in zip(views, F.pad(images, (2, 2, 2, 2)).float()):     # each is one of 5 x 5 crops, flipped or not
        crops = [image[:, a:a + 16, b:b + 16] for a in range(5) for b in range(5)]
        assert sum(torch.allclose(view, x, atol=1e-3) for crop in crops for x in (crop, crop.flip(2))) == 1
    assert len({view.numpy().tobytes() for view in views}) == 50


def test_er_replays_in_one_forward_and_keeps_a_uniform_sample():
    learner, tasks, sizes = learner_of("er")
    learner.step(*first(tasks[0])), learner.step(*second(tasks[0]))
    assert sizes == [8, 16] and len(learner.memory.rows) == 12
    kept = torch.zeros(40)
    for seed in range(1000):
        memory = baselines.Memory(4, torch.Generator().manual_seed(seed))
        for part in torch.arange(40).split(8):
            memory.add(part)
        kept[torch.stack([row[0] for row in memory.rows])] += 1
    assert ((kept - 100) ** 2 / 90).sum() < 75                  # expected 100 each: chi-square of 40 cells


def test_der_stores_the_logits_of_its_view_and_never_refreshes_them():
    learner, tasks, sizes = learner_of("der", buffer=8)
    outs, real = [], learner.logits
    learner.logits = lambda x, net=None: outs.append(real(x, net)) or outs[-1]
    learner.step(*first(tasks[0]))
    assert torch.equal(stored(learner, 2), outs[0].detach())
    before, learner.memory.capacity = stored(learner, 2), 0     # takes nothing more
    learner.step(*second(tasks[0]))
    assert torch.equal(stored(learner, 2), before) and sizes == [8, 8, 8]           # passes of their own
    gradients = []
    for alpha in (0.0, 5.0):                                    # the stored logits pull
        learner, tasks, _ = learner_of("der", buffer=8, alpha=alpha)
        learner.memory.add(*first(tasks[0]), torch.full((8, 10), 9.0), torch.ones(8))
        learner.step(*second(tasks[0]))
        gradients.append(learner.net.head.bias.grad.clone())
    assert (gradients[1] - gradients[0]).max() < 0              # a step up for every logit


def test_derpp_adds_a_second_independent_draw_with_labels():
    for method, passes in (("der", 3), ("derpp", 4)):
        learner, tasks, sizes = learner_of(method)
        real, drawn = learner.memory.draw, []
        learner.memory.draw = lambda count: drawn.append(real(count)) or drawn[-1]
        learner.step(*first(tasks[0])), learner.step(*second(tasks[0]))
        assert sizes == [8] * passes
    assert not torch.equal(drawn[-1][0], drawn[-2][0])


def test_icarl_herds_cuts_and_distils(monkeypatch):
    learner, tasks, _ = learner_of("icarl")
    learner.step(*first(tasks[0]))
    learner.finish(*tasks[0])
    assert [len(e) for e in learner.exemplars] == [6, 6] and len(learner.memory.rows) == 12
    kept = [e.clone() for e in learner.exemplars]
    of_class = tasks[0][0][tasks[0][1] == 0]                    # herding, as a loop over all candidates
    h, chosen = learner.features(of_class).double(), []
    for _ in range(6):
        rest = [i for i in range(20) if i not in chosen]
        chosen.append(min(rest, key=lambda i: (h[[*chosen, i]].mean(0) - h.mean(0)).norm()))
    assert torch.equal(kept[0], of_class[chosen])
    assert learner.scores(tasks[0][0]).shape == (40, 2)         # distances to the means of the classes seen
    learner.old, learner.seen = 2, 4
    pool, owner = learner.pool(*tasks[1])
    assert len(pool) == 40 + 12 and owner[-12:].tolist() == [0] * 6 + [1] * 6       # every image once, old or new
    targets, real = [], F.binary_cross_entropy_with_logits
    monkeypatch.setattr(F, "binary_cross_entropy_with_logits", lambda out, y: targets.append(y) or real(out, y))
    learner.step(*first(tasks[1]))
    assert targets[0].shape[1] == 4 and ((targets[0][:, :2] > 0) & (targets[0][:, :2] < 1)).all()   # sigmoids
    assert set(targets[0][:, 2:].flatten().tolist()) == {0.0, 1.0}
    learner.finish(*tasks[1])
    assert [len(e) for e in learner.exemplars] == [3] * 4 and torch.equal(learner.exemplars[0], kept[0][:3])


def test_gem_projects_onto_the_cone_of_its_constraints():
    torch.manual_seed(0)
    for count in (1, 2, 4):
        G, g = torch.randn(count, 30), torch.randn(30)
        g = g - 2 * G.sum(0)                                    # violates them
        out = baselines.gem_project(g, G, 0.0)
        assert (G @ out > -1e-2).all() and (G @ g).min() < 0
        A, b, v = (G @ G.T + 1e-3 * torch.eye(count)).double(), (G @ g).double(), torch.zeros(count).double()
        for _ in range(5000):                                   # projected gradient descent, far converged
            v = (v - 0.01 * (A @ v + b)).clamp(min=0)
        assert torch.allclose(out, g + G.T @ v.float(), atol=1e-2)
    learner, tasks, _ = learner_of("gem", buffer=20)
    learner.finish(*tasks[0])
    assert len(learner.memory.rows) == 4                        # 20 // 5 of each task
    learner.step(*first(tasks[1]))


def test_gss_lets_in_only_gradients_unlike_the_stored_ones():
    learner, tasks, _ = learner_of("gss", buffer=4)
    images, labels = first(tasks[0])
    learner.step(images[:4], labels[:4])                        # fills the memory
    assert torch.equal(stored(learner, 0), images[:4]) and stored(learner, 2).tolist() == close([0.1] * 4)
    G, before = learner.gradients(images, labels), [v.clone() for v in learner.net.state_dict().values()]
    learner.net.eval()                                          # one by one, by autograd
    for g, x, y in zip(G, data.normalise(images, **learner.colours), labels):
        grads = torch.autograd.grad(F.cross_entropy(learner.net(x[None]), y[None]), learner.parameters.values())
        assert torch.allclose(g, torch.cat([p.flatten() for p in grads]), atol=1e-5)
    learner.net.train()
    assert all(torch.equal(a, b) for a, b in zip(before, learner.net.state_dict().values()))
    directions = {}
    learner.gradients = lambda x, y: torch.stack([directions[image.numpy().tobytes()] for image in x])
    for sign, moved in ((1.0, False), (-1.0, True)):            # alike: a score of 2; opposite: of 0
        directions.update({image.numpy().tobytes(): torch.ones(5) for image in images[:4]})
        directions.update({image.numpy().tobytes(): sign * torch.ones(5) for image in images[4:]})
        learner.remember(images[4:], labels[4:])
        assert torch.equal(stored(learner, 0), images[:4]) != moved
    assert 0.0 in stored(learner, 2).round(decimals=4)          # a score of its own


def test_gcr_keeps_few_weighted_images_whose_gradient_is_that_of_all(monkeypatch):
    g = torch.eye(8).double()[[0] * 5 + [1] * 3 + [2]]          # 5, 3 and 1 samples with the same gradient
    weights = baselines.matching_pursuit(10 * g, 3)
    assert sorted(weights[weights > 0].tolist()) == close([1, 3, 5], rel=0.01)
    torch.manual_seed(0)
    g = torch.randn(40, 12).double()
    weights = baselines.matching_pursuit(g, 12)
    error = lambda w: (w.double() @ g - g.sum(0)).norm()
    random = [F.one_hot(torch.randperm(40)[:12], 40).sum(0) * 40 / 12 for _ in range(50)]
    assert (weights >= 0).all() and (weights > 0).sum() <= 12 and error(weights) < 0.5 * min(map(error, random))

    learner, tasks, sizes = learner_of("gcr", buffer=24, beta=1.0, alpha=0.0)
    for t, task in enumerate(tasks[:3], 1):
        learner.old, learner.seen = 2 * t - 2, 2 * t
        for _ in range(6):
            learner.step(*first(task)), learner.step(*second(task))
            assert len(learner.memory.rows) + len(learner.reservoir.rows) <= 24     # never more than the buffer
        assert all(row[1] < learner.old for row in learner.memory.rows)
        assert all(row[2].argmax() == row[1] for row in learner.reservoir.rows)     # classified correctly then
        learner.finish(*task)
        assert len(learner.memory.rows) <= t * (24 // (t + 1)) and max(sizes) == 8
    assert set((stored(learner, 1) // 2).tolist()) == {0, 1, 2}

    real, seen = baselines.matching_pursuit, []                 # it gets last-layer gradients, as by autograd
    monkeypatch.setattr(baselines, "matching_pursuit", lambda g, count: seen.append(g) or real(g, count))
    rows = [[x, y, torch.zeros(10), torch.tensor(2.0)] for x, y in zip(*first(tasks[0])) if y == 0]
    chosen = learner.choose(rows, 2)
    learner.net.eval()
    x = data.normalise(rows[0][0][None], **learner.colours)
    parts = torch.autograd.grad(2 * F.cross_entropy(learner.net(x), rows[0][1][None]),
                                [learner.net.head.bias, learner.net.head.weight])
    assert torch.allclose(seen[0][0].float(), torch.cat([part.flatten() for part in parts]), atol=1e-5)
    wanted = real(seen[0], 2)
    assert [row[3].item() for row in chosen] == close((2 * wanted[wanted > 0].sort(descending=True)[0]).tolist())

    gradients = []                                              # a weight of 0 does not pull
    for weights in (torch.tensor([1.0, 0.0] * 4), torch.tensor([0.0, 1.0] * 4)):
        learner, tasks, _ = learner_of("gcr", buffer=8, beta=0.0, alpha=5.0)
        learner.memory.capacity = 8
        learner.memory.add(*first(tasks[0]), torch.tensor([9.0, -9.0] * 4)[:, None].expand(8, 10), weights)
        learner.step(*second(tasks[0]))
        gradients.append(learner.net.head.bias.grad.clone())
    assert (gradients[0] < gradients[1]).all()                  # up to 9; down to -9


def test_cila_is_co2l_with_ird_weighted_by_the_losses_of_the_tasks_before():
    train.main([*TINY, "--plasticity", "supcon", "--stability", "ird", "--out", "co2l"])
    assert baselines.cila([*TINY, "--out", "same"], Path("same"), 0.0) == [1.0] * 4
    found = baselines.cila([*TINY, "--out", "cila"], Path("cila"), 5.0)
    net = lambda run, t: data.read(Path(run) / f"task{t}.pt")["net"]
    equal = lambda a, b, t: all(map(torch.equal, net(a, t).values(), net(b, t).values()))
    assert all(equal("co2l", "same", t) for t in range(1, 6))   # task by task is one run
    assert equal("co2l", "cila", 2) and not equal("co2l", "cila", 3)                # task 2: lambda 1
    log = [json.loads(line) for line in open("cila/log.jsonl")]
    for t in range(2, 6):
        total = lambda key: sum(e[key] for e in log if 2 <= e["task"] < t)
        assert found[t - 2] == close(1 if t == 2 else max(1, 5 * total("stability") / total("plasticity")))
    assert len(log) == 10 and min(found[1:]) > 1 and train.train.__name__ == "train"


def test_baselines_command_reports_its_own_head_and_our_readouts(capsys):
    argv = ["--method", "er", *TINY, "--buffer", "10"]
    baselines.main([*argv, "--out", "er"])
    assert "own classifier, AA: Class-IL" in capsys.readouterr().out
    r = json.load(open("er/results.json"))
    assert {"head", "linear", "image_free"} <= r.keys() and "prototype" not in r and r["method"]["lr"] == 0.1
    assert len(r["head"]["class_il"]["matrix"]) == 5 and json.load(open("er/head.json")) == r["head"]
    assert r["old_images"] <= 10 and "loss" in json.loads(open("er/log.jsonl").readline())
    baselines.main(["--method", "cila", *TINY, "--tasks", "2", "--kappa", "2", "--out", "cila"])
    assert json.load(open("cila/results.json"))["method"]["lambda"] == [1.0]
    for wrong, message in ((["--lr", "1000", "--out", "lost"], "smaller --lr than 1000"),
                           (["--out", "er"], "holds a run"), (["--buffer", "9", "--out", "few"], "give --buffer"),
                           (["--tasks", "1", "--out", "all"], "joint"), (["--dataset", "folder"], "--tasks is needed")):
        with pytest.raises(data.UserError, match=message):
            baselines.main([*argv, *wrong])
    with pytest.raises(data.UserError, match="er is not a run of train.py"):
        train.main(["--resume", "--out", "er"])


def test_every_line_of_cifar_sh_is_a_valid_command(here):
    """The queue with a `python` that only writes down how it was called."""
    (here / "bin").mkdir(), (here / "results").mkdir()
    (here / "bin" / "python").write_text(f'#!/bin/sh\necho "$@" >> {here}/commands\n')
    (here / "bin" / "python").chmod(0o755)
    (here / "results" / "cifar.sh").write_text((ROOT / "results" / "cifar.sh").read_text())
    for run in ("hsd-0", "hsd-1", "co2l-0", "co2l-1"):          # task 1 of seed 2 is missing: without --init
        (here / "runs" / "cifar10" / run).mkdir(parents=True)
        (here / "runs" / "cifar10" / run / "task1.pt").touch()
    subprocess.run(["bash", "results/cifar.sh"], env=os.environ | {"PATH": f"{here}/bin:{os.environ['PATH']}"},
                   stderr=subprocess.DEVNULL)
    names = set()
    for program, *argv in (line.split() for line in open("commands") if not line.startswith("eval.py")):
        c = train.parse([word for i, word in enumerate(argv) if "--method" not in (word, argv[i - 1])])
        name, seed = Path(c.out).name.rsplit("-", 1)
        method = name.split("-")[0]
        assert report.label(name) and int(seed) == c.seed and f"buffer{c.buffer}" in name or c.buffer == 0
        assert program == "train.py" or argv[argv.index("--method") + 1] == method
        task1 = "hsd" if c.plasticity == "fnc2" and method != "cila" else "co2l"
        shared = method not in ("hsd", "co2l", "joint") or c.buffer
        wanted = f"runs/cifar10/{task1}-{seed}/task1.pt" if shared and seed != "2" else None
        assert c.init == wanted or program != "train.py" and method != "cila", name
        names.add(name)
    assert {f"{name}-buffer{n}" if n else name for n, rows in report.PAPER.items() for name in rows} <= names


# ---------------------------------------------------------------------------- analysis.py

def test_analysis_of_the_readout_has_eval_pys_own_as_its_first_row(evaluated, capsys):
    analysis.main(["readout", str(evaluated), "--device", "cpu"])
    rows = dict(re.findall(r"^\| (.*?) \| (.* / .*) \|$", capsys.readouterr().out, re.M)[1:])
    r, own = json.loads((evaluated / "results.json").read_text())["image_free"], next(iter(rows.values()))
    assert own == " / ".join(f"{r[kind]['aa']:.1f}" for kind in ("class_il", "task_il"))
    assert rows.keys() > analysis.VARIANTS.keys() and sum(name.startswith("linear") for name in rows) == 2
    assert len(set(rows.values())) > len(rows) / 3              # the options do something
    assert rows[f"ridge {evaluation.fit_map.__defaults__[0]}"] == own
    images, g = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8), torch.Generator().manual_seed(0)
    patches = lambda x: sorted(x[:, i:i + 2, j:j + 2].flatten().tolist() for i in (0, 2, 4, 6) for j in (0, 2, 4, 6))
    for x, turned, shuffled in zip(images, *analysis.other_images(images, g).chunk(2)):
        assert any(torch.equal(turned, x.rot90(k, (1, 2))) for k in (1, 2, 3))
        assert patches(shuffled) == patches(x) and not torch.equal(shuffled, x)


def test_analysis_of_prototypes_and_of_gamma(evaluated, capsys):
    analysis.main(["prototypes", str(evaluated), "--device", "cpu"])
    rows = [[None if cell == "-" else float(cell) for cell in line.strip("| ").split(" | ")]
            for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)]
    r = json.loads((evaluated / "results.json").read_text())
    for i, key in enumerate(("nc1", "nc2", "nc3", "nc4"), 1):   # the mean over tasks is eval.py's
        assert sum(row[i] for row in rows) / 5 == close(r["nc"][key], abs=0.006)
    assert [row[5] for row in rows] == close(r["prototype"]["class_il"]["matrix"][-1], abs=0.006)
    c, d = train.open_run(evaluated)[0], train.load_data(train.open_run(evaluated)[0], "cpu")
    net, state = train.load_net(evaluated / "task1.pt", c, "cpu")
    with torch.no_grad():                                       # S-PRD's targets in task 2
        q = torch.cat([(frozen_copy(net)(x) @ state["prototypes"][:4].T / c.zeta_past).softmax(1)
                       for x, _ in analysis.batches(d, 2, c.batch_size)])
    assert rows[1][9] == close(100 * q[:, :2].sum(1).mean().item(), abs=0.006) and rows[0][9:] == [None] * 3
    z, p, y = F.normalize(torch.randn(50, 16), dim=1), simplex_etf(10, 16), torch.arange(50) % 10
    assert analysis.part_of_r(z[:10], y[:10], p, p[:2], tau=0.5, gamma=1) == close(100)     # no positives
    whole = analysis.gradient(lambda z: fnc2_loss(z, y, p, tau=0.5, gamma=0), z)
    others = analysis.gradient(lambda z: 4 / 5 * supcon_loss(z, y, tau=0.5), z)             # four positives each
    own = (whole - others).norm() / ((whole - others).norm() + others.norm())
    assert analysis.part_of_r(z, y, p, p[:0], tau=0.5, gamma=0) == close(100 * own.item(), rel=1e-3)
    analysis.main(["focal", str(evaluated), "--device", "cpu"])
    found = re.findall(r"cosine with gamma 0 ([\d.]+), length \+([\d.]+) %", capsys.readouterr().out)
    assert len(found) == 10 and all(float(cosine) > 0.9 for cosine, _ in found)


# ---------------------------------------------------------------------------- report.py and plot.py

def script(*argv):
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("folder", KEPT, ids=lambda path: path.name)
def test_tables_are_the_means_of_the_kept_results(folder):
    """Every row of report.py stands in results/README.md; of validation images the average accuracy alone."""
    page, tables = (ROOT / "results" / "README.md").read_text(), ["aa"]
    if "validation" not in folder.name:
        tables += ["forgetting", "differences", "learning", *["paper"] * (folder.name == "cifar10-50")]
    for what in tables:
        status, printed, error = script(ROOT / "results" / "report.py", folder, what)
        rows = printed.strip().splitlines()[2:]
        assert status == 0 and len(rows) > 1, error
        for row in rows:
            assert row in page, f"run results/report.py {folder} {what}: {row}"


def test_the_lead_over_co2l_by_length_is_that_of_the_kept_results():
    page = (ROOT / "results" / "README.md").read_text()
    for folder, name, epochs in (("cifar10-12", "hsd", 12), ("cifar10-12", "hsd-epochs24", 24), ("cifar10-50", "hsd", 50)):
        learning, differences = (script(ROOT / "results" / "report.py", ROOT / "results" / folder, what)[1]
                                 for what in ("learning", "differences"))
        seeds = report.load(ROOT / "results" / folder)[name]
        n, linear = len(seeds), report.cells(seeds, ["linear"])[0]
        below = re.search(rf"^\| {re.escape(report.label(name))} \| {n} \| \S+, (\S+), ", learning, re.M)[1]
        lead = re.search(r"^\| FNC2 \+ HSD over Co2L \(SupCon \+ IRD\), linear \| (.*?) \| (.*?) \|", differences, re.M)
        lead = lead.groups() if name == "hsd" else ("not run",) * 2
        assert f"| {epochs} | {n} | {linear} | {below} | {' | '.join(lead)} |" in page


def test_front_page_has_the_figures_of_the_kept_results():
    page, tables = ((ROOT / name).read_text() for name in ("README.md", "results/README.md"))
    rows = re.findall(r"^\| (?:0|200|cifar10|cifar100|tinyimagenet) \|.*", page, re.M)
    assert len(rows) >= 5 and set(rows) <= set(tables.splitlines())     # which are report.py's, and speed.py's
    assert len(leads := re.findall(r"^\| (.*?) \| ([+-][^|]*) \| ([+-][^|]*) \| ([+-][^|]*) \|$", page, re.M)) == 3
    for over, linear, image_free, paper in leads:
        for text, published in ((f"linear | {linear}", paper), (f"image-free | {image_free}", "-")):
            row = re.escape(f"| FNC2 + HSD over {over}, {text} | ") + ".*" + re.escape(f" | {published} |")
            assert re.search(f"^{row}$", tables, re.M), row
    shapes = report.load(ROOT / "results" / "shapes")
    for readout in ("linear", "image_free"):
        cells = [report.cell([r[readout]["class_il"]["aa"] for r in shapes[name]]) for name in ("hsd", "co2l", "none")]
        assert " | ".join(cells) in page
        for folder, text in (("cifar10-50", page.split("![")[0]), ("cifar100", page)):  # the first above the picture
            seeds = report.load(ROOT / "results" / folder)["hsd"]
            assert report.cell([r[readout]["class_il"]["aa"] for r in seeds]) in text


def test_chance_is_the_loss_of_equal_similarities(evaluated):
    c = train.open_run(evaluated)[0]
    entry = json.loads((evaluated / "log.jsonl").read_text().splitlines()[-1])      # task 5: 8 old prototypes
    z, y, p = torch.zeros(16, 16), torch.arange(16) % 2, torch.zeros(10, 16)
    wanted = fnc2_loss(z, y, p, p[:8], tau=c.tau, gamma=c.gamma).item()
    assert report.chance(entry, vars(c)) == close(wanted, rel=1e-5)
    half = report.chance(entry | {"views_per_second": 20, "seconds": 2}, vars(c) | {"buffer": 10})
    assert half == close(wanted / 2, rel=1e-5)                  # ten of twenty images are no anchors
    assert report.chance(entry | {"task": 1}, vars(c) | {"plasticity": "supcon"}) == close(math.log(15))


def test_paper_has_every_row_of_table_2_and_says_not_run(capsys):
    report.paper({})
    rows = re.findall(r"^\| (?:0|200) \|.*", capsys.readouterr().out, re.M)
    assert len(rows) == 2 + 9 + 1 and all("| 0 | not run |" in row for row in rows)             # 1: DER++


def test_pictures_of_runs_and_of_kept_results(evaluated, here):
    pytest.importorskip("matplotlib"), pytest.importorskip("sklearn")
    import plot
    plot.main([str(evaluated), "--out", "figures"])
    for seed in (0, 1):
        (here / f"hsd-{seed}.json").write_text((evaluated / "results.json").read_text())
    plot.main(["--kept", str(here), "hsd", "hsd:image_free", "--out", "figures/kept.png"])
    assert sorted(path.name for path in (here / "figures").iterdir() if path.stat().st_size > 5000) == [
        "accuracy.png", "embeddings.png", "kept.png", "tasks.png"]
    for name in ("hsd:head", "none"):
        with pytest.raises(data.UserError, match=f"results of {name.split(':')[0]} in"):
            plot.main(["--kept", str(here), name])


@pytest.mark.parametrize("package", ["matplotlib", "sklearn"])
def test_plots_without_their_packages_say_so(package):
    path = str(ROOT / "results" / "plot.py")
    status, _, error = script("-c", f"import sys, runpy; sys.modules['{package}'] = None; sys.argv = ['plot.py', 'x']; "
                              f"runpy.run_path({path!r}, run_name='__main__')")
    assert status == 2 and "pip install matplotlib scikit-learn" in error and "Traceback" not in error


# ---------------------------------------------------------------------------- speed.py

def test_profile_of_a_step_and_seconds_of_both_readouts(here, evaluated, capsys):
    words = {"augmentation", "student forward", "loss", "backward", "optimizer", "whole step", "bare network", "ratio"}
    for extra in ([], ["--amp"], ["--stability", "none"]):
        speed.main(["profile", *TINY, "--buffer", "4", "--steps", "2", *extra])
        found = set(re.findall(r"^  ([a-z ]*[a-z])   ", capsys.readouterr().out, re.M))
        assert found == words | ({"teacher forward"} if "none" not in extra else set())
    assert not list(here.iterdir()) and train.fnc2_loss is fnc2_loss
    speed.main(["probe", str(evaluated)])
    assert re.search(r"5 tasks: linear readout [\d.]+ s, image-free [\d.]+ s", capsys.readouterr().out)


def test_memory_and_work_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(speed, "IMAGES", {"cifar10": (50000, 10000)})
    speed.memory(check=False)
    row = re.search(r"^\| cifar10 \|.*", capsys.readouterr().out, re.M)[0].strip("| ").split(" | ")
    assert row[1:] == ["5.9", "3.1", "0.2", "67", "0.9"]     # as in the README
    c = train.parse(["--dataset", "cifar10"])
    with FlopCounterMode(display=False) as forward, torch.device("meta"):
        Encoder(c.width, c.dim)(torch.zeros(2 * c.batch_size, 3, 32, 32))
    alone, both = (speed.counted_flop(c, teacher) for teacher in (False, True))
    assert alone == close(3 * forward.get_total_flops(), rel=0.02)                  # forward, backward
    assert both - alone == close(forward.get_total_flops(), rel=0.02)
