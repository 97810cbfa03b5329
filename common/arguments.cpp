#include "common/arguments.h"

#include <algorithm>

#include "common/files/regular_file.h"
#include "common/trouble.h"

namespace poise {

std::vector<std::string> with_hyphens(int argc, const char* const* argv) {
  std::vector<std::string> words(argv, argv + argc);
  for (std::string& word : words) {
    if (word == "--") {
      break;
    }
    if (word.starts_with("--")) {
      const auto end = std::find(word.begin(), word.end(), '=');
      std::replace(word.begin(), end, '_', '-');
    }
  }
  return words;
}

cxxopts::ParseResult parse_arguments(cxxopts::Options& options,
                                     const std::vector<std::string>& words) {
  std::vector<const char*> argv;
  for (const std::string& word : words) {
    argv.push_back(word.c_str());
  }
  try {
    cxxopts::ParseResult given = options.parse(static_cast<int>(argv.size()), argv.data());
    if (!given.unmatched().empty()) {
      fail("unexpected argument \"{}\" (options: {} --help)", shown(given.unmatched().front()),
           options.program());
    }
    return given;
  } catch (const cxxopts::exceptions::exception& problem) {
    fail("{} (options: {} --help)", shown(problem.what(), 300), options.program());
  }
}

std::string required_argument(const cxxopts::ParseResult& given, const std::string& name) {
  if (given.count(name) == 0 || given[name].as<std::string>().empty()) {
    fail("--{} is missing", name);
  }
  return given[name].as<std::string>();
}

}  // namespace poise
