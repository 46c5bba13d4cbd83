"""What a universal checkpoint consists of: DeepSpeed's loaders of stages 1 and 2 and of stage 3 want different files.

The universal form for the stage that saved is the one that DeepSpeed's converter makes. The form for the other stages
is what their loader reads: the same values, wrapped as it expects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import Tensor

from .errors import EnvironmentFailed
from .pieces import Parameter
from .records import Frame, frame
from .shards import FP32
from .source import ADAM_STATES, COMMON_STATE, ShardedSource, check_name

ZERO = "zero"
PARAM = "param"
NESTED = "optimizer_state_dict"
"""The key of the common state that stage 3 has and the others have not."""
NUMBERS = "dalsegno_numbers"
"""Key in the common state: what an optimizer counts besides its step, by parameter. DeepSpeed's loaders ignore it."""
_MODEL_STAGE_1_2 = "mp_rank_00_model_states.pt"
_MODEL_STAGE_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_PADDINGS = "group_paddings"
_PARAM_GROUPS = "param_groups"
# For stages 1 and 2: what lies in the parameters' own files.
_SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")
# What both kinds of optimizer have in common.
_GLOBAL = ("loss_scaler", "dynamic_loss_scale", "overflow", "partition_count")


def model_states_name(stage: int) -> str:
    """Under which name the loader of a ZeRO stage looks for the first rank's model states."""
    return _MODEL_STAGE_3 if stage == 3 else _MODEL_STAGE_1_2


@dataclass(frozen=True)
class Form:
    """The files of the universal form of one source.

    Attributes:
        source: The opened checkpoint.
        stage: The ZeRO stage that will load it.
    """

    source: ShardedSource
    stage: int

    def __post_init__(self) -> None:
        others = set(self.source.states) - {FP32, *ADAM_STATES}
        if self.stage == 3 and others and not self.source.ours:
            raise EnvironmentFailed(
                f"optimizer states {sorted(others)}: DeepSpeed's universal loading of ZeRO-3 knows only Adam's moments"
            )

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all files, relative to the checkpoint's directory."""
        paths = [f"{ZERO}/{name}/{state}.pt" for name in self.source.parameters for state in self.source.states]
        paths += [f"{ZERO}/{name}/{FP32}.pt" for name in self.unpartitioned]
        paths += [f"{ZERO}/{name}/step.pt" for name in self.steps]
        return (*sorted(paths), f"{ZERO}/{COMMON_STATE}", *self.model_files)

    @cached_property
    def unpartitioned(self) -> Mapping[str, Tensor]:
        """What stages 1 and 2 save and no optimizer owns: frozen parameters, buffers, names of tied weights.

        DeepSpeed's converter makes these files; none of its loaders reads them.

        Raises:
            Impossible: A name cannot be a directory's.
        """
        if self.source.stage == 3 or self.stage == 3:
            return {}
        module: Mapping[str, Tensor] = self.source.model["module"]
        partitioned = self.source.parameters
        found = {name: value for name, value in module.items() if name not in partitioned and isinstance(value, Tensor)}
        for name in found:
            check_name(name)
        return found

    @cached_property
    def steps(self) -> Mapping[str, Any]:
        """The optimizer's step by parameter, which has files of its own for stages 1 and 2."""
        if self.stage == 3:
            return {}
        steps = {name: self._step(parameter.group) for name, parameter in self.source.parameters.items()}
        return {name: step for name, step in steps.items() if step is not None}

    @property
    def model_files(self) -> Mapping[str, str]:
        """Files of model states, which are taken over unchanged: path in the universal form, and name in the source."""
        names = {name: name for name in self.source.model_files}
        return {model_states_name(self.stage): self.source.model_files[0], **names}

    @property
    def nbytes(self) -> int:
        """Bytes of values in the files that are written: almost all of their size."""
        flat = self.source.first.flat
        total = 0
        for parameter in self.source.parameters.values():
            for state in self.source.states:
                like = flat[parameter.group].get(state, flat[parameter.group][FP32])
                total += parameter.numel * like.element_size()
        return total + sum(4 * value.numel() for value in self.unpartitioned.values())

    def frame(self, parameter: Parameter, dtype: torch.dtype) -> Frame:
        """What surrounds the values of one state of ``parameter`` in its file."""
        if self.stage == 3:
            return frame((parameter.numel,), dtype)
        return frame(parameter.shape, dtype, key=PARAM, cat_dim=0)

    def common_state(self) -> dict[str, Any]:
        """The content of ``optimizer_state.pt``."""
        counted = {name: self.source.first.numbers[one.group] for name, one in self.source.parameters.items()}
        numbers = {name: dict(values) for name, values in counted.items() if values}
        return {**self._common_state(), **({NUMBERS: numbers} if numbers else {})}

    def _common_state(self) -> dict[str, Any]:
        if (self.source.stage == 3) == (self.stage == 3):
            return self._own_state_3() if self.stage == 3 else self._own_state_1_2()
        state = {key: self.source.first.optimizer[key] for key in _GLOBAL if key in self.source.first.optimizer}
        groups = self._groups()
        if self.stage < 3:
            version = self.source.model["ds_version"]
            return {**state, "zero_stage": ZeroStageEnum.gradients, "ds_version": version, _PARAM_GROUPS: groups}
        # Some optimizers count steps in the group; stage 3's loader looks here.
        scalars = {group: {"step": groups[0].get("step", 0), **values} for group, values in self._scalars().items()}
        inner = {"state": scalars, _PARAM_GROUPS: groups}
        return {**state, "zero_stage": ZeroStageEnum.weights, NESTED: inner, _PARAM_GROUPS: groups}

    def _own_state_1_2(self) -> dict[str, Any]:
        state = {key: value for key, value in self.source.first.optimizer.items() if key not in _SHARDED}
        if state.get(_PADDINGS):  # paddings of rank 0's partitions, which no longer exist
            state[_PADDINGS] = [0] * len(state[_PADDINGS])
        return {**state, _PARAM_GROUPS: self._groups()}

    def _own_state_3(self) -> dict[str, Any]:
        state = {key: value for key, value in self.source.first.optimizer.items() if key != "fp32_flat_groups"}
        groups = self._groups()
        inner = {"state": self._scalars(), _PARAM_GROUPS: groups}
        return {**state, NESTED: inner, _PARAM_GROUPS: groups}

    def _scalars(self) -> dict[int, dict[str, Any]]:
        """What is not partitioned, by (sub-)group: stage 3's loader wants a step there."""
        gathered = {} if self.source.reset else self.source.inner["state"]
        scalars: dict[int, dict[str, Any]] = {
            group: {key: value for key, value in values.items() if not isinstance(value, Tensor) or value.dim() == 0}
            for group, values in gathered.items()
        }
        groups = range(len(self.source.first.steps))
        return scalars or {group: {"step": torch.tensor(0.0, device="cpu")} for group in groups}

    def _groups(self) -> list[Mapping[str, Any]]:
        groups = self.source.parameter_groups
        # Some optimizers count steps in the group.
        return [{**group, "step": 0} if self.source.reset and "step" in group else group for group in groups]

    def _step(self, group: int) -> Any:
        step = self.source.first.steps[group]
        if step is not None or not (self.source.reset and self.source.adam):
            return step
        return torch.tensor(0.0, device="cpu")
