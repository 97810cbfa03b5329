#pragma once
// `poise bench --stage loader`: how fast a checkpoint's files are read and how fast their bytes are digested, each
// beside its own limit: direct reads for the disk, copies and sums for memory. As many threads as
// loading has, in the pieces in which it reads. Takes 32 MiB of memory for each thread and no shared memory; blocks
// until all is measured.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "common/units.h"

namespace poise {

using BytesPerSecond = double;

struct FileSpeed {
  std::string name;
  Bytes size;
  Bytes measured;  // its beginning, at most 2 GiB
  std::optional<double>
      cached;  // share of it in the page cache before; nothing: the system does not say
  BytesPerSecond read = 0;  // as the loader reads it, in that state
  std::optional<BytesPerSecond>
      disk;  // past the page cache; nothing: its file system cannot do that
};

struct LoadingSpeed {
  std::size_t threads = 0;
  std::vector<FileSpeed> files;
  BytesPerSecond digest = 0;         // of bytes in memory
  BytesPerSecond memory_copied = 0;  // bytes that are copied, counted once
  BytesPerSecond memory_read = 0;
};

// Fails as loading would if the directory holds no checkpoint.
LoadingSpeed measure_loading(const std::filesystem::path& model);
std::string to_json(const LoadingSpeed& speed);

}  // namespace poise
