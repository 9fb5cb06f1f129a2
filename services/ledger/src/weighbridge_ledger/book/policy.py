"""The numbers of the rules. Each was found by simulation or chosen in docs/ledger.md; settings may replace some."""

from weighbridge_common.immutable import immutable


@immutable
class Policy:
    """Times in seconds of the monotonic clock."""

    term_s: float = 15.0
    """A lease is marked SUSPECT when its holder has been silent for so long (rule 10)."""
    min_term_s: float = 5.0
    max_term_s: float = 600.0
    """A holder may ask for a term of its own between these."""
    activate_by_s: float = 10.0
    """A grant that nobody activates is freed after this (rule 6)."""
    grace_s: float = 20.0
    """Beyond the term, for holders that fence themselves: longer than TERM, wait 10 s, KILL takes (rule 12)."""
    vacate_s: float = 30.0
    """A VACATING lease counts as pending for so long, then it is overdue: charged, no longer hoped for (rule 18)."""
    max_wait_s: float = 600.0
    """A claim waits at most this long when its call has no earlier deadline (rule 15)."""
    ticket_s: float = 60.0
    """A broken-off claim keeps its place in the order for so long (rule 14)."""
    queue_bound: int = 256
    """Waiters at once; one more is refused with advice to retry (rule 15)."""
    queue_retry_s: float = 5.0
    """The advice to retry when the queue is full."""
    protect_passes: int = 8
    """So often a waiter may be overtaken harmfully before it is protected (rule 16; unlimited: C=2, w=2 never)."""
    protect_after_s: float = 60.0
    """A waiter that has waited so long is protected (rule 16)."""
    look_ahead: int = 32
    """Waiters per pool that are examined; beyond it the order is strict, which is live too (rule 16)."""
    age_s: float = 30.0
    """Waiting so long raises a claim's level by one (rule 15). Without it two interactive claims that alternate keep a
    background one waiting for ever (L)."""
    top_level: int = 3
    """Interactive: as far as waiting raises a claim."""
    idle_s: float = 2.0
    """So long a holder must be idle before it is asked to vacate for a claim that is not protected (rule 19)."""
    min_residency_s: float = 30.0
    max_residency_s: float = 120.0
    """A model stays at least twice its load time, between these, from load complete on (rule 22). Three models on one
    card: 15 % of the time loading instead of 30, longest wait 83 s to 116 s (P); a cool-down on top gained no more
    than a point, so there is none."""
    longest_load_s: float = 600.0
    """A holder that says nothing of its load has finished it by then, at the latest with its first use."""
    exact_victims: int = 12
    """Up to so many candidates the best set of victims is looked for among all sets (rule 20)."""
    steady_samples: int = 3
    """So many samples of use from outside must agree, with nothing loading, before holders are asked to vacate for it
    (rule 3)."""
    optional_step_bytes: int = 64 * 2**20
    """Optional bytes are granted in steps of this (rule 4): a cache of odd size helps nobody."""
    shrink_s: float = 10.0
    """Optional bytes that were asked back are hoped for so long."""
    ended_kept: int = 4096
    """Ended requests that are remembered so that a late Admit is not granted again (rule 9)."""
    ended_s: float = 3600.0
    """And for how long: far beyond any deadline or retry of a client."""
    tickets_kept: int = 1024
    """Upper bound on remembered places, four full queues."""

    engines_per_lease: int = 64
    """Engine processes recorded on one lease at most."""
    uses_per_lease: int = 4096
    """Uses open at once on one lease: more are a holder that forgets to end them."""
    released_kept: int = 256
    """Released leases that are still shown on demand."""

    @property
    def standstill_s(self) -> float:
        """Half of the shortest term: looking away for longer may concern some lease (rule 14)."""
        return min(self.term_s, self.min_term_s, self.activate_by_s) / 2

    def term(self, asked_s: float | None) -> float:
        """The term of a lease whose holder asked for `asked_s`."""
        return self.term_s if asked_s is None else min(max(asked_s, self.min_term_s), self.max_term_s)
