#pragma once
// Identifies the build that measures a profile. It names only what can change the measured times: the
// messages, the sources of the kernels, the executor and the profiler, and how they were compiled. A run
// whose build has another name measures again (process/preparation.cpp compares).

#include <string>

namespace poise {

// "poise 0.1.0 contracts 1a2b3c4d, work 5e6f7a8b, Release"
std::string measuring_build();

}  // namespace poise
