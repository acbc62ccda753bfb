"""What the page of `varlap reproduce` says under its tables: how β was chosen, what is missing, what was timed."""

from collections.abc import Mapping, Sequence

from varlap.experiments.final_line import FinalLine
from varlap.experiments.grid import paper_numbers
from varlap.experiments.ways import NAMES, Key, variances_at_an_end
from varlap.plot.style import plain_number
from varlap.report import names
from varlap.report.sweep_tables import SCORES, papers_times, table_of_all_ways, unlike_the_papers
from varlap.report.sweeps import Sweep, in_order


def how_beta_was_chosen(sweep: Sweep) -> str:
    """Say in words how honest the tables are.

    >>> from varlap.experiments import Result, RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> def result(beta, nll):
    ...     return Result(RunSpec("digits", "vl", beta), {"mean": {"nll": nll}}, {"mean": {"nll": nll}}, {}, 1.0)
    >>> (sweep,) = sweeps([result(0.003, 0.3), result(0.01, 0.4)])
    >>> how_beta_was_chosen(sweep).endswith("Every row has had 2 trials. One seed: small differences may be chance.")
    True
    """
    chosen = _chosen_before(sweep, sweep.final) if sweep.final is not None else _chosen_here(sweep)
    others = (_papers_scores, which_multiplier, num_seeds, what_is_missing)
    return " ".join(filter(None, [chosen, *(say_fn(sweep) for say_fn in others)]))


def _papers_scores(sweep: Sweep) -> str:
    """Say what may make the paper's scores others than ours."""
    if not sweep.papers_scores:
        return ""
    return f"The paper calls its scores{sweep.after} 'best values' and mentions no held-out set."


def what_is_best(sweep: Sweep) -> str:
    """Say in short which way of predicting has the best NLL; nothing where none was chosen.

    >>> from varlap.experiments import Result, RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> scores = {"mean": {"nll": 0.25, "accuracy": 0.92, "ece": 0.02}}
    >>> (sweep,) = sweeps([Result(RunSpec("cifar10", "vl", 0.1), scores, scores, {}, 9.0)])
    >>> print(what_is_best(sweep))
    Best test NLL: VL, 0.250 (accuracy 92.0 %, ECE 0.020). The paper's best: VL, 0.23 (92.4 %, 0.017). One seed: ...
    """
    table = table_of_all_ways(sweep)
    if table is None:
        return ""
    nlls = {row.name: round(row.cells["nll"].value, 3) for row in table.rows}
    first, *others = [row for row in table.rows if nlls[row.name] == min(nlls.values())]
    nll, accuracy, ece = (first.cells[name].value for name in SCORES)
    words = f"Best test NLL: {first.name}, {nll:.3f} (accuracy {100 * accuracy:.1f} %, ECE {ece:.3f})."
    if others:
        words += f" The same NLL to three digits: {'; '.join(row.name for row in others)}."
    if theirs := {} if sweep.after else sweep.papers_scores:
        name, (nll, accuracy, ece) = min(theirs.items(), key=lambda row: row[1][0])
        words += f" The paper's best: {name}, {nll:.2f} ({100 * accuracy:.1f} %, {ece:.3f})."
    return f"{words} {num_seeds(sweep)}".strip()


def which_multiplier(sweep: Sweep) -> str:
    """Say which runs are shown where some have a faster or slower log σ; nothing where all have the same.

    >>> from varlap.experiments import Result, RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> specs = [RunSpec("digits", "vl", 0.1, log_sigma_lr_multiplier=times) for times in (1, 10)]
    >>> (sweep,) = sweeps([Result(spec, {}, {}, {}, 1.0) for spec in specs])
    >>> which_multiplier(sweep)
    "Of the multipliers of log σ's learning rate, × 1, × 10, only runs with × 10 are here."
    """
    if len(sweep.multipliers) == 1:
        return ""
    found = ", ".join(f"× {multiplier:g}" for multiplier in sweep.multipliers)
    return f"Of the multipliers of log σ's learning rate, {found}, only runs with × {sweep.multiplier:g} are here."


def what_is_missing(sweep: Sweep) -> str:
    """Name the runs that diverged, and the recorded rows without runs; nothing where all is there.

    >>> from varlap.experiments import Result, RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> (sweep,) = sweeps([Result(RunSpec("digits", "vl", 0.1), {}, {}, {}, 1.0, failure="the loss is NaN")])
    >>> what_is_missing(sweep)
    'Diverged, and so left out: VL, β 0.1, seed 0 (the loss is NaN).'
    """
    words = [] if sweep.final is None else _not_run(sweep, sweep.final)
    return " ".join(filter(None, [*words, what_diverged(sweep)]))


def what_diverged(sweep: Sweep) -> str:
    """Name the runs that diverged, and why; nothing where all came to their end.

    >>> from varlap.experiments import Result, RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> (sweep,) = sweeps([Result(RunSpec("digits", "vl", 0.1), {}, {}, {}, 1.0, failure="the loss is NaN")])
    >>> what_diverged(sweep)
    'Diverged, and so left out: VL, β 0.1, seed 0 (the loss is NaN).'
    """
    named = [f"{sweep.name(result.spec)} ({result.failure})" for result in in_order(sweep.diverged)]
    return f"Diverged, and so left out: {'; '.join(named)}." if named else ""


def how_it_was_timed(sweep: Sweep) -> str:
    """Say what the seconds of Table 2 are, and with which curvature of VL.

    >>> from varlap.experiments import Result, RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> (ours,) = sweeps([Result(RunSpec("cifar10", "vl", 0.1, curvature="default"), {}, {}, {}, 3.0)])
    >>> how_it_was_timed(ours).partition("other. ")[2]
    "VL's curvature: of a sixteenth of the images. The paper's times are of other steps and left out: exact curvature."
    """
    if sweep.spec.epochs == 1:
        words = "The one epoch without validation; a GPU compiles in it, so that it is longer than others would be."
    else:
        words = "Median over epochs, without validation and without the first, in which a GPU compiles."
    words += " Runs that shared a device slowed each other. VL's curvature: "
    if papers_times(sweep):
        words += "exact, as the paper's. The paper's hardware is another: compare ratios, of runs that had a device to "
        return f"{words}themselves."
    words += "exact." if sweep.spec.curvature == "exact" else "of a sixteenth of the images."
    if sweep.is_the_papers and sweep.spec.data in paper_numbers("table-2"):
        theirs = ", ".join(names.setting(key, value) for key, value in unlike_the_papers(sweep).items())
        words += (
            f" The paper's times are of other steps and left out: {theirs}."
            if theirs
            else " The paper's times stand beside runs of the experiment table-2 alone."
        )
    return words


def _chosen_before(sweep: Sweep, line: FinalLine) -> str:
    sweeps = {
        method: f"a sweep of {names.epochs(line.sweep_epochs[method])} over {{}} with "
        f"{_seeds(line.sweep_seeds[method])}"
        for method in line.sweep_betas
    }
    tried = {method: ", ".join(f"{beta:g}" for beta in betas) for method, betas in line.sweep_betas.items()}
    if len(set(sweeps.values())) > 1:  # one call chose for some methods, and another for others
        by = "; ".join(f"{words.format(tried[method])} ({method.upper()})" for method, words in sweeps.items())
    else:
        same = len(set(tried.values())) == 1
        listed = [betas if same else f"{betas} ({method.upper()})" for method, betas in tried.items()]
        by = next(iter(sweeps.values())).format("; ".join(dict.fromkeys(listed)))
    counts = {method.upper(): len(betas) for method, betas in line.sweep_betas.items()}
    same = len(set(counts.values())) == 1
    trials = (
        f"{next(iter(counts.values()))} trials of β for every row"
        if same
        else f"unequal numbers of trials ({', '.join(f'{method} {number}' for method, number in counts.items())})"
    )
    if line.borrowed:
        named = " and ".join(f"‘{row}’" for row in line.borrowed)
        trials += f" that it scored. It has not scored {named}: the β there is that of the method's mean network"
    row, others = "each row", ""
    if lacking := {key: choice.num_trials for key, choice in sweep.choices().items() if key[0] not in line.seeds}:
        row = " and ".join(method.upper() for method in line.seeds)
        others = (
            " The other methods have no final runs: their β is chosen by the NLL of held-out images among the runs "
            f"here, the numbers of trials being {_by_row(lacking)}."
        )
    return (
        f"The β of {row} was chosen before, by the NLL of held-out images in {by}: {trials}.{others} No β here was "
        "chosen by the test images."
    )


def _chosen_here(sweep: Sweep) -> str:
    trials = {key: choice.num_trials for key, choice in sweep.choices().items()}
    if set(trials.values()) == {1}:
        return "One β for each method, which no finished sweep of all of them has chosen."
    share = f"{sweep.spec.validation:.0%} of the training images"
    words = (
        f"β is chosen by the NLL of {share}, which were held out. Best on test is what choosing by the test images "
        "would have given: it is no fair score, and stands here for comparison."
    )
    if len(set(trials.values())) > 1:
        return f"{words} Mind that the rows have not had the same number of trials: {_by_row(trials)}."
    return f"{words} Every row has had {next(iter(trials.values()))} trials."


def at_an_end(sweep: Sweep) -> str:
    """Name the rows whose β is the least or the largest of those tried; nothing where all are inside.

    >>> from varlap.experiments import Result, RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> def result(beta, nll):
    ...     return Result(RunSpec("digits", "vl", beta), {"mean": {"nll": nll}}, {"mean": {"nll": nll}}, {}, 1.0)
    >>> (sweep,) = sweeps([result(0.003, 0.3), result(0.01, 0.4)])
    >>> at_an_end(sweep)
    'The chosen β is at an edge of those tried, so one beyond might be better: VL at β 0.003.'
    """
    ends, of_variances = [], []
    choices = sweep.choices()
    for key, choice in choices.items():
        tried = choice.betas if sweep.final is None else sweep.final.sweep_betas.get(key[0], choice.betas)
        if len(tried) > 1 and choice.beta in (min(tried), max(tried)):
            ends.append(f"{NAMES[key]} at β {choice.beta:g}")
        scores = [run.test[key[1]] for run in choice.by_validation]
        betas = dict.fromkeys(each["laplace_beta"] for each in scores if variances_at_an_end(each))
        of_variances += [f"{NAMES[key]} at β {plain_number(beta)} of its variances" for beta in betas]
    if len(ends) == len(choices) > 1:
        ends = ["every row"]
    named = "; ".join([*ends, *of_variances])
    return f"The chosen β is at an edge of those tried, so one beyond might be better: {named}." if named else ""


def num_seeds(sweep: Sweep) -> str:
    """Say of how many seeds the rows are, where that is one or differs."""
    numbers = {key: len(choice.by_validation) for key, choice in sweep.choices().items()}
    if set(numbers.values()) == {1}:
        return "One seed: small differences may be chance."
    if len(set(numbers.values())) < 2:
        return ""
    return f"The rows are of unequal numbers of seeds: {_by_row(numbers)}."


def _not_run(sweep: Sweep, line: FinalLine) -> list[str]:
    missing, without = [], []
    for row in line.rows:
        key = row.method, row.way
        runs = line.runs(key, (*sweep.results, *sweep.diverged))
        wanted, found = line.seeds.get(row.method, ()), {run.spec.seed for run in runs}
        seeds = [seed for seed in wanted if seed not in found]
        name = f"{NAMES[key]} at β {row.beta:g}"
        if seeds:
            missing.append(f"{name} with {_seeds(seeds)}" if len(seeds) < len(wanted) else name)
        if any(run.failure is None and row.way not in run.test for run in runs):
            without.append(name)
    words = [f"Not run yet: {'; '.join(missing)}."] if missing else []
    if without:  # by --no-linearised, or since it gave NaN
        words.append(f"Run, but not scored in this way: {'; '.join(without)}.")
    return words


def _by_row(numbers: Mapping[Key, int]) -> str:
    return "; ".join(f"{NAMES[key]} {number}" for key, number in numbers.items())


def _seeds(numbers: Sequence[int]) -> str:
    return f"seed{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
