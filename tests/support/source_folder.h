#pragma once
// Where files that tests read lie: the sources they were built from, or the folder that
// POISE_SOURCE_DIR names, where the programs were carried to another machine.

#include <cstdlib>
#include <filesystem>

namespace poise {

inline std::filesystem::path source_folder() {
  const char* given = std::getenv("POISE_SOURCE_DIR");
  return given != nullptr ? given : POISE_SOURCE_DIR;
}

}  // namespace poise
