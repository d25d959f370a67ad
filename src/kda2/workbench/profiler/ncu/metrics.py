"""The one table of counters that kda2 asks Nsight Compute for, and what each of them means.

Names are those of a chip of compute capability 9.0. One that another chip, another version or a smaller set of sections
lacks is n/a there.
"""

from __future__ import annotations

from dataclasses import dataclass

from kda2.workbench.profiler.ncu.model import DURATION, REGISTERS, SHARED, KernelProfile

SAMPLES = "smsp__pcsamp_sample_count"
PARTED = "smsp__branch_targets_threads_divergent"

COUNTERS: dict[str, str] = {
    # the launch
    DURATION: "time on the device",
    REGISTERS: "registers of a thread",
    SHARED: "shared memory of a block, the driver's part included",
    "launch__shared_mem_per_block_static": "shared memory of a block, declared",
    "launch__shared_mem_per_block_dynamic": "shared memory of a block, asked for at launch",
    "launch__shared_mem_per_block_driver": "shared memory of a block, the driver's part",
    "launch__grid_size": "blocks",
    "launch__waves_per_multiprocessor": "times that the grid fills the device",
    "device__attribute_multiprocessor_count": "multiprocessors",
    "device__attribute_max_shared_memory_per_block_optin": "shared memory that a block may have",
    # how busy
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "the busiest unit of the multiprocessors",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "the busiest part of the memory system",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "DRAM",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed": "L1 and shared memory",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "cycles in which the tensor pipe works",
    "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active": "tensor instructions of warpgroups",
    "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active": "tensor instructions of warps",
    # memory
    "dram__bytes_read.sum": "bytes read from DRAM",
    "dram__bytes_write.sum": "bytes written to DRAM",
    "l1tex__t_sector_hit_rate.pct": "sectors found in L1",
    "lts__t_sector_hit_rate.pct": "sectors found in L2",
    "lts__t_sectors.sum": "sectors that L2 was asked for",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": "warp loads from global memory",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": "warp stores to global memory",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "sectors that these loads touched",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "sectors that these stores touched",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum": "sectors of loads from local memory",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum": "sectors of stores to local memory",
    "memory_l2_theoretical_sectors_global": "sectors that accesses to global memory ask for",
    "memory_l2_theoretical_sectors_global_ideal": "the same if no byte of a sector were left unused",
    "memory_l1_wavefronts_shared": "passes through shared memory",
    "memory_l1_wavefronts_shared_ideal": "the same without bank conflicts",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "bank conflicts as the hardware counts them",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "passes through shared memory as the hardware counts them",
    "derived__local_spilling_requests": "requests to local memory that spilled registers make",
    "smsp__sass_inst_executed_op_local_ld.sum": "loads from local memory",
    "smsp__sass_inst_executed_op_local_st.sum": "stores to local memory",
    "lts__t_sectors_srcunit_tex_op_atom.sum": "sectors in L2 of atomics that return a value",
    "lts__t_sectors_srcunit_tex_op_red.sum": "sectors in L2 of atomics that return none",
    "smsp__inst_executed_op_shared_atom.sum": "atomics on shared memory",
    # warps
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps that are resident",
    "sm__maximum_warps_per_active_cycle_pct": "warps that could be resident",
    "launch__occupancy_limit_registers": "blocks that the registers allow",
    "launch__occupancy_limit_shared_mem": "blocks that the shared memory allows",
    "launch__occupancy_limit_warps": "blocks that the warps allow",
    "launch__occupancy_limit_blocks": "blocks that a multiprocessor allows",
    "launch__occupancy_limit_barriers": "blocks that the barriers allow",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "cycles in which a scheduler issues",
    "sm__inst_executed.avg.per_cycle_active": "instructions a cycle",
    "smsp__warps_eligible.avg.per_cycle_active": "warps of a scheduler that could issue",
    "smsp__inst_executed.sum": "instructions of warps",
    "smsp__inst_executed_op_branch.sum": "branches of warps",
    "smsp__thread_inst_executed_per_inst_executed.ratio": "threads at work in an instruction",
    "smsp__sass_average_branch_targets_threads_uniform.pct": "branches that all threads of a warp take alike",
    PARTED: "branches at which the threads of a warp part",
}  # fmt: skip


@dataclass(frozen=True)
class Stall:
    """A reason why a warp does not issue: its word in the counters of cycles and in those of samples, the cause, and
    what to change."""

    cycles: str
    samples: str
    cause: str
    suggestion: str

    @property
    def counter(self) -> str:
        """Cycles that a warp stalls for this reason between two instructions."""
        return f"smsp__average_warps_issue_stalled_{self.cycles}_per_issue_active.ratio"

    @property
    def sampled(self) -> str:
        """Samples of warps that stalled for this reason, per instruction too."""
        return f"smsp__pcsamp_warps_issue_stalled_{self.samples}"


def _stall(word: str, cause: str, suggestion: str, samples: str = "") -> Stall:
    return Stall(word, samples or word, cause, suggestion)


STALLS: tuple[Stall, ...] = (
    _stall("barrier", "Warps wait for others of their block at a barrier.",
           "Give all warps the same work, synchronise fewer warps, or fewer times."),
    _stall("long_scoreboard", "Warps wait for data from global or local memory.",
           "Load earlier (more stages in flight, TMA or cp.async), or have more warps to switch to."),
    _stall("short_scoreboard", "Warps wait for shared memory or for the special function unit.",
           "Keep values in registers, remove bank conflicts, and use fewer exponentials, divisions and shuffles."),
    _stall("mio_throttle", "The queue of shared memory and special functions is full.",
           "Use fewer and wider accesses to shared memory, and fewer shuffles."),
    _stall("lg_throttle", "The queue of loads and stores to global and local memory is full.",
           "Use fewer and wider accesses (16 bytes a thread, or TMA), and see that nothing spills."),
    _stall("tex_throttle", "The queue of the texture unit is full.", "Use fewer texture accesses."),
    _stall("math_pipe_throttle", "The pipe that the next instruction needs is taken.",
           "Move work to another pipe, or to matrix products; this is what a compute-bound kernel looks like."),
    _stall("gmma", "Warps wait to start a product of their warpgroup.",
           "Keep more than one wgmma in flight, and wait for its operands less.", "warpgroup_arrive"),
    _stall("wait", "Warps wait out the fixed latency of their own last instruction.",
           "Interleave independent instructions, or have more warps to switch to."),
    _stall("no_instruction", "The next instruction is not in the instruction cache.",
           "Unroll less, so that the loop fits, or let all warps run the same code.", "no_instructions"),
    _stall("imc_miss", "A constant or a kernel argument is not in its cache.",
           "Read constants once, before the loop; pass fewer arguments."),
    _stall("branch_resolving", "Warps wait for the target of a branch.", "Use fewer or predicated branches."),
    _stall("dispatch_stall", "The dispatcher holds an instruction back, as for conflicts between registers.",
           "Look at the machine code around this instruction."),
    _stall("drain", "Warps that have finished wait for their stores.",
           "Store earlier, wider, or through TMA, and see that the stores are whole sectors."),
    _stall("membar", "Warps wait for a memory fence.", "Use fewer fences, or of a narrower scope."),
    _stall("sleeping", "Warps sleep or yield, as in a loop that polls a flag.",
           "Let the producer be ahead, or poll less often."),
    _stall("misc", "Warps wait for another reason of the hardware.", "Look at the machine code there."),
)  # fmt: skip
# A warp that issues, and one that another was preferred to: no reasons to complain.
ISSUING = tuple(
    f"smsp__average_warps_issue_stalled_{word}_per_issue_active.ratio" for word in ("selected", "not_selected")
)

# Counters that a report has for every instruction, beside the samples of each stall.
PER_INSTRUCTION: dict[str, str] = {
    SAMPLES: "samples of warps at this instruction",
    PARTED: "branches at which the threads of a warp part",
    "inst_executed": "executions by warps",
    "memory_l1_wavefronts_shared": "passes through shared memory",
    "memory_l1_wavefronts_shared_ideal": "the same without bank conflicts",
    "memory_l2_theoretical_sectors_global": "sectors asked for",
    "memory_l2_theoretical_sectors_global_ideal": "the same if no byte of a sector were left unused",
    "memory_l2_theoretical_sectors_local": "sectors of local memory",
}


def collected() -> tuple[str, ...]:
    """Every counter of a launch that kda2 looks at; `--set full` of Nsight Compute brings them all."""
    return (*COUNTERS, *(stall.counter for stall in STALLS), *ISSUING)


def per_instruction() -> tuple[str, ...]:
    """Every counter that kda2 looks at for each instruction."""
    return (*PER_INSTRUCTION, *(stall.sampled for stall in STALLS))


def not_collected(kernel: KernelProfile) -> tuple[str, ...]:
    """The counters of `collected()` that are n/a for this launch: what depends on them cannot be said."""
    return tuple(name for name in collected() if name not in kernel.metrics)
