"""Seeded search over the design space of one stage. Optuna's TPE sampler suggests; what was measured is told to it."""

from __future__ import annotations

import warnings
from typing import Any

from kda2.workbench import extras
from kda2.workbench.candidates import Configs
from kda2.workbench.records import Candidate
from kda2.workbench.writer.template import Space, name_of

# Suggestions of what is known already before a search gives up on finding anything new.
_TRIES = 40


class Search:
    """Suggests configurations of `stage` around `best`, from the times of those that are known. The same seed, and the
    same times in the same order, give the same suggestions."""

    name = "kda2 search"

    def __init__(self, space: Space, base: Configs, best: Candidate, stage: str, seed: int) -> None:
        self._optuna = extras.load("optuna", "the search")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        choices = {field: sorted(values) for field, values in space[stage].items()}
        self._distributions = {f: self._optuna.distributions.CategoricalDistribution(v) for f, v in choices.items()}
        with warnings.catch_warnings(action="ignore"):  # both options are marked experimental
            sampler = self._optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=4, multivariate=True, constant_liar=True
            )
        self._study = self._optuna.create_study(sampler=sampler)
        self._base, self._best, self._stage = base, best, stage

    def know(self, configs: Configs, us: float) -> None:
        """A configuration whose time is known already."""
        mine = configs[self._stage]
        if all(mine[field] in d.choices for field, d in self._distributions.items()):
            params = {field: mine[field] for field in self._distributions}
            trial = self._optuna.trial.create_trial(params=params, distributions=self._distributions, value=us)
            self._study.add_trial(trial)

    def ask(self, seen: frozenset[str], most: int) -> list[Candidate]:
        """At most `most` candidates that nobody has seen."""
        found: dict[str, Candidate] = {}
        for _ in range(_TRIES):
            if len(found) == most:
                break
            trial = self._study.ask(self._distributions)
            configs = {
                s: {**c, **trial.params} if s == self._stage else dict(c) for s, c in self._best.parameters.items()
            }
            name = name_of(self._base, configs, self._best.impl)
            if name not in seen and name not in found:
                found[name] = self._candidate(name, configs)
            else:  # it would be suggested again and again
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return list(found.values())

    def _candidate(self, name: str, configs: dict[str, Any]) -> Candidate:
        best = self._best
        return Candidate(
            name=name, op=best.op, impl=best.impl, writer=self.name, source=best.source, parent=best.name,
            parameters=configs, hypothesis=f"{self._stage}: suggested by the search, from the times so far",
        )  # fmt: skip
