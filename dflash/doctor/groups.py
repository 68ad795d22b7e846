"""The groups of checks, in the order they are shown; `dflash doctor NAME` runs one of them alone."""

from dflash.doctor import attention, data, machine, resources, target
from dflash.doctor.base import Group

GROUPS: dict[str, Group] = {
    "machine": machine.checks,
    "attention": attention.checks,
    "target": target.checks,
    "data": data.checks,
    "resources": resources.checks,
}
