#pragma once
// How the three programs read their command lines: cxxopts, but what is wrong with it is one
// sentence. Underscores pass for hyphens in the names of options, as in vLLM; what stands behind
// "--" or "=" is left alone.

#include <string>
#include <vector>
#define CXXOPTS_NO_REGEX  // compiles in half the time, and without warnings under sanitizers
#include <cxxopts.hpp>

namespace poise {

// argv, with "--host_memory=3" as "--host-memory=3".
std::vector<std::string> with_hyphens(int argc, const char* const* argv);
// Fails where an option is unknown, or its value is missing or of another type, and where a word
// belongs to no option.
cxxopts::ParseResult parse_arguments(cxxopts::Options& options,
                                     const std::vector<std::string>& words);
// The value of an option without which nothing goes; fails where it is missing or empty.
std::string required_argument(const cxxopts::ParseResult& given, const std::string& name);

}  // namespace poise
