/* The chaos build (FA_CHAOS=1): random delays where kernels synchronise, and waits that end.
 *
 * A race between warps shows only where one of them is held up at the wrong moment. In a chaos build every wait,
 * arrival, TMA issue, named barrier and step of an epilogue begins with FA_CHAOS_POINT: one lane of the warp draws a
 * delay from (seed, time of the block's start, block, warp, site, visit), and the warp waits for it. 15 of 16 visits
 * draw none, the others 1 to 20 us, one in 1,000 0.2 to 2 ms: rare and long finds what dense and short averages out. A
 * wait on an mbarrier that lasts 2 s writes where it stands into host memory (fa_chaos_report) and traps, so that a
 * hang is an error of the call. In any other build all of this is empty.
 *
 * A site is a source line; the process that starts a kernel knows which one runs. chaos_delay.cuh has the delays. */
#pragma once

#ifdef FA_CHAOS
#include "common/chaos_delay.cuh"
#else
#define FA_CHAOS_POINT(site)         ((void)(site))
#define FA_CHAOS_BEGIN()             ((void)0)
#define FA_CHAOS_ARM(stream, launch) ((void)0)
#endif
