/* Instances of the kernels with a producer warp: their kinds, and the names that @instance gives them. */
#pragma once

#define FA_FULL         0 // no key is excluded but by the end of the keys
#define FA_MASKED       1 // a range of keys a row: causal, window
#define FA_CAPPED       2 // the same, with softcap

#define FA_PASTE_(a, b) a##b
#define FA_PASTE(a, b)  FA_PASTE_(a, b)
