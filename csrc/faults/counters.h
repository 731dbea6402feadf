/* What calls have met in index arrays, a context and device: counted on the CPU by the front ends, on a device by its
 * kernels. */
#ifndef FA_COUNTERS_H
#define FA_COUNTERS_H

#include "faults/faults.h"

/* What is bad in the arrays of a problem on the CPU: an error where it is to be checked, else counted. Kernels on the
 * CPU leave this to the front ends; those on a device count by themselves. */
fa_code fa_faults_meet(fa_context *context, const fa_problem *problem, bool checks, fa_status *status);

/* An error for what is bad in the arrays of a problem on the current device: copies them and waits for the stream. */
fa_code fa_faults_look(const fa_problem *problem, void *stream, fa_status *status);

/* What was counted for calls on `device` since it was last cleared. */
fa_code fa_faults_take(fa_context *context, fa_device device, bool clear, fa_faults *found, fa_status *status);

#endif
