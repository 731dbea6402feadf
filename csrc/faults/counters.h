/* Faults that calls have met in index arrays, by context and device: the front ends count those of the CPU, a device's
 * kernels their own. */
#ifndef FA_COUNTERS_H
#define FA_COUNTERS_H

#include "faults/faults.h"

/* Looks for faults in the arrays of a problem on the CPU: an error where the call asks for a check, else they are
 * counted. Kernels on the CPU leave this to the front ends; those on a device count by themselves. */
fa_code fa_faults_meet(fa_context *context, const fa_problem *problem, bool checks, fa_status *status);

/* An error for what is bad in the arrays of a problem on the current device: copies them and waits for the stream. */
fa_code fa_faults_look(const fa_problem *problem, void *stream, fa_status *status);

/* The faults of calls on `device` since the counters were last cleared. */
fa_code fa_faults_take(fa_context *context, fa_device device, bool clear, fa_faults *found, fa_status *status);

#endif
