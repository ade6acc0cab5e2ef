"""Serves /health and /health/ready, which say what is wrong with the server, and for whom.

Both name the same problems. `/health` fails while a model does not answer at all. `/health/ready`
also fails while a model makes no progress, so that a load balancer can send requests elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.models import ServedModels, models_of
from rekindle.front.openai_answers import HealthProblem, ProblemCode
from rekindle.http.responses import JsonResponse
from rekindle.protocol.admin import HEALTHY_DISK_STATES
from rekindle.worker.client import RuntimeClient

STUCK_AFTER_S = 30.0  # the longest step and the longest encoding take a few seconds

#: Problems that leave a model without answers, and those that leave it without progress.
DOWN: tuple[ProblemCode, ...] = ("model_loading", "model_restarting", "model_failed")
STUCK: tuple[ProblemCode, ...] = ("engine_stuck", "encoders_stuck")

router = APIRouter(tags=["models"])


@router.get("/health")
async def health(request: Request) -> Response:
    """Answer 200 if all models answer. Otherwise answer 503 with the reason: a model is loading,
    gone or stuck, or the server is stopping. `degraded` means that all models answer, but something
    else is wrong, which `problems` names."""
    return _answer(models_of(request), DOWN)


@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """As `/health`, for load balancers: also 503 while a model makes no progress."""
    return _answer(models_of(request), (*DOWN, *STUCK))


def _answer(models: ServedModels, failing: tuple[ProblemCode, ...]) -> Response:
    # A model that is not loaded answers when a request has loaded it.
    problems = [problem for each in models.all_loaded for problem in problems_of(each)]
    if not problems:
        return JsonResponse({"status": "ok"})
    body: dict[str, object] = {"status": "degraded", "problems": problems}
    blocking = [each["message"] for each in problems if each["code"] in failing]
    if not blocking:
        return JsonResponse(body)
    body |= {"status": "unavailable", "reason": blocking[0]}
    return JsonResponse(body, status_code=503, headers={"retry-after": "1"})


def problems_of(runtime: RuntimeClient) -> Iterator[HealthProblem]:
    """Yield what is wrong with a model, as far as its heartbeats tell."""
    name, supervisor = runtime.name, runtime.supervisor
    if runtime.ready is None:
        yield HealthProblem(model=name, code=_down_code(runtime), message=supervisor.down_reason)
        return
    if runtime.heartbeat.encoding_s > STUCK_AFTER_S:
        seconds = f"{runtime.heartbeat.encoding_s:.0f} s"
        message = f"a request of model {name} has been encoded for {seconds}"
        yield HealthProblem(model=name, code="encoders_stuck", message=message)
    elif supervisor.watchdog.stalled_s > STUCK_AFTER_S:
        seconds = f"{supervisor.watchdog.stalled_s:.0f} s"
        message = f"the process of model {name} has made no progress for {seconds}"
        yield HealthProblem(model=name, code="engine_stuck", message=message)
    if (state := runtime.heartbeat.disk_state) not in HEALTHY_DISK_STATES:
        message = f"the disk cache of model {name} is not written: it is {state}"
        yield HealthProblem(model=name, code="disk_cache_off", message=message)


def _down_code(runtime: RuntimeClient) -> ProblemCode:
    if runtime.supervisor.failed_restarts:
        return "model_failed"
    return "model_loading" if runtime.supervisor.process is None else "model_restarting"
