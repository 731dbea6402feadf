/* Bad contents of index arrays that calls meet: an error, or counted a device. */
#ifndef FA_FAULTS_H
#define FA_FAULTS_H

#include "device.h"
#include "problem_sequences.h"

/* What is bad in the arrays of a problem on the CPU: an error where it is to be checked, else counted. Kernels on the
 * CPU leave this to the front ends. */
fa_code fa_faults_meet(fa_context *context, const fa_problem *problem, bool checks, fa_status *status);

/* What was counted for calls on `device` since it was last cleared. */
fa_code fa_faults_take(fa_context *context, fa_device device, bool clear, fa_faults *found, fa_status *status);

#endif
