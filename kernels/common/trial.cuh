/* Ways through a kernel that the emulator has judged and no device has run yet. A build takes them where it is told to,
 * with -DFA_TRIAL=1 (NVCC_APPEND_FLAGS and no objects of before), as the emulator's are: what is chosen otherwise has
 * run on a device. */
#pragma once

#ifndef FA_TRIAL
#define FA_TRIAL 0
#endif

namespace fa {

inline constexpr bool kTrial = FA_TRIAL;

} // namespace fa
