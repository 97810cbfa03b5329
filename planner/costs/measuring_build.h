#pragma once
// Which build measured a profile, as far as what it measures depends on it: the messages, the sources of
// the kernels, the executor and the profiler, and how they were compiled. A build with another one measures
// again.

#include <string>

namespace poise {

// "poise 0.1.0 contracts 1a2b3c4d, work 5e6f7a8b, Release"
std::string measuring_build();

}  // namespace poise
