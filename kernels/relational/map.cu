// Values of a generated step on the rows of one domain. The text of the step is injected as step.cuh, of which this
// reads STEP_PARAMETERS, STEP_ARGUMENTS, struct Arguments and finish_row(arg, row, l, writes).
#include "include/storage.cuh"
#include "include/reduce.cuh"
#include "relational/rows.cuh"

#include "step.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32)
relational_map(i64 num_rows, STEP_PARAMETERS) {
    const Arguments arg = STEP_ARGUMENTS;
    const Lanes l = lane_layout();
    const i64 row = item_of_lane(l);
    finish_row(arg, row < num_rows ? (int)row : 0, l, row < num_rows);
}
