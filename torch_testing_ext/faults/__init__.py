"""Inject faults into ranks at chosen points of a test, and check that the other ranks recover."""

from torch_testing_ext.fault_points import fault_point as fault_point, reached as reached

from .in_ranks import heal as heal, incarnation as incarnation
from .kinds import (
    PlannedFault as PlannedFault,
    PlannedRestart as PlannedRestart,
    abort as abort,
    exits as exits,
    hold_gil as hold_gil,
    kill as kill,
    raises as raises,
    restart as restart,
    segv as segv,
    slow as slow,
    stop as stop,
)
from .planned_sweeps import (
    KnownFailure as KnownFailure,
    Points as Points,
    Sweep as Sweep,
    Wrong as Wrong,
    calls as calls,
    fault_sweep as fault_sweep,
    known as known,
    steps as steps,
)
from .plans import PLAN as PLAN, FaultPlan as FaultPlan, faults as faults, plan_of as plan_of
from .points import (
    OPERATIONS as OPERATIONS,
    STORE_OPERATIONS as STORE_OPERATIONS,
    Point as Point,
    call as call,
    mark as mark,
    step as step,
    store as store,
)
from .text import KINDS as KINDS, fault_of_text as fault_of_text, faults_of_text as faults_of_text
