"""Those who take part in the creation of groups see and change its arguments, the outermost first."""

import inspect

import torch.distributed as dist
from kit.own_process import error_of, in_own_process
from kit.plain_groups import world_of_one

from torch_testing_ext._torch.groups import group_creators

C10D = dist.distributed_c10d


@in_own_process
def test_order():
    said = []

    def creator(name):
        def take_part(arguments, create):
            said.append((name, arguments["group_desc"]))
            if name == "outer":
                arguments["group_desc"] = "changed"
            made = create()
            said.append(name)
            return made

        return take_part

    signature = inspect.signature(C10D._new_process_group_helper)
    group_creators.take_part(creator("inner"))
    group_creators.take_part(creator("outer"))
    assert inspect.signature(C10D._new_process_group_helper) == signature
    world_of_one()
    group = dist.new_group([0], group_desc="given")
    assert said[-4:] == [("outer", "given"), ("inner", "changed"), "inner", "outer"]
    assert group.group_desc == "changed"


@in_own_process
def test_errors_pass():
    def refuse(arguments, create):
        raise PermissionError(arguments["group_name"])

    world_of_one()
    group_creators.take_part(refuse)
    assert isinstance(error_of(lambda: dist.new_group([0])), PermissionError)


def test_groups_of_members():
    group = object()
    assert group_creators.group_of_member((group, None)) is group
    assert group_creators.group_of_member((dist.GroupMember.NON_GROUP_MEMBER, None)) is None
