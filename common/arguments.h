#pragma once
// How the three programs read their command lines: with cxxopts, and with one sentence for each
// error. Underscores count as hyphens in option names, as in vLLM; text after "--" or "=" is left
// as it is.

#include <string>
#include <vector>
#define CXXOPTS_NO_REGEX  // compiles in half the time, and without warnings under sanitizers
#include <cxxopts.hpp>

namespace poise {

// argv, with "--host_memory=3" as "--host-memory=3".
std::vector<std::string> with_hyphens(int argc, const char* const* argv);
// Fails if an option is unknown, if its value is missing or has the wrong type, or if a word belongs
// to no option.
cxxopts::ParseResult parse_arguments(cxxopts::Options& options,
                                     const std::vector<std::string>& words);
// The value of a required option; fails if it is missing or empty.
std::string required_argument(const cxxopts::ParseResult& given, const std::string& name);

}  // namespace poise
