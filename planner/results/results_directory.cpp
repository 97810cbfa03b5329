#include "planner/results/results_directory.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <vector>

#include "common/files/regular_file.h"
#include "common/files/replace_file.h"
#include "common/liveness/progress.h"
#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::size_t kCopiedAtOnce = 1 << 20;
constexpr Bytes kLongestPublication = kMiB;
constexpr Bytes kLongestVerified{64};

void remove_file(const std::filesystem::path& run_dir, const char* name) {
  if (::unlink((run_dir / name).c_str()) == 0) {
    sync_directory(run_dir);
  } else if (errno != ENOENT) {
    fail_to_write(run_dir / name, errno);
  }
}

}  // namespace

bool same_bytes(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::error_code none;
  if (!std::filesystem::is_regular_file(a, none) || !std::filesystem::is_regular_file(b, none)) {
    return false;
  }
  const RegularFile first(a), second(b);
  if (first.size() != second.size()) {
    return false;
  }
  std::vector<std::byte> one(kCopiedAtOnce), other(kCopiedAtOnce);
  const auto size = static_cast<std::uint64_t>(first.size().n);
  for (std::uint64_t offset = 0; offset < size; offset += kCopiedAtOnce) {
    const std::size_t bytes = std::min<std::uint64_t>(kCopiedAtOnce, size - offset);
    first.read_exactly(offset, {one.data(), bytes});
    second.read_exactly(offset, {other.data(), bytes});
    note_progress();
    if (std::memcmp(one.data(), other.data(), bytes) != 0) {
      return false;
    }
  }
  return true;
}

// The size in decimal, a newline, then the path as it is: a path is bytes, not text.
std::optional<Publication> read_publication(const std::filesystem::path& run_dir) {
  const std::filesystem::path path = run_dir / kPublishedName;
  std::error_code none;
  if (!std::filesystem::exists(path, none)) {
    return std::nullopt;
  }
  const std::string text = read_text_file(path, kLongestPublication);
  Publication publication;
  const char* end = text.data() + text.size();
  const auto [newline, error] = std::from_chars(text.data(), end, publication.size.n);
  if (error != std::errc() || newline == end || *newline != '\n' || newline + 1 == end) {
    fail("{} is damaged; use another run directory", shown(path.string(), 300));
  }
  publication.output = std::string(newline + 1, end);
  return publication;
}

void write_publication(const std::filesystem::path& run_dir, const Publication& publication) {
  replace_file(run_dir / kPublishedName,
               fmt::format("{}\n{}", publication.size.n, publication.output.string()));
}

void remove_publication(const std::filesystem::path& run_dir) { remove_file(run_dir, kPublishedName); }

std::optional<Bytes> read_verified(const std::filesystem::path& run_dir) {
  const std::filesystem::path path = run_dir / kVerifiedName;
  std::error_code none;
  if (!std::filesystem::exists(path, none)) {
    return std::nullopt;
  }
  const std::string text = read_text_file(path, kLongestVerified);
  Bytes size;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size.n);
  if (error != std::errc() || std::string_view(end, text.data() + text.size()) != "\n" || size < Bytes{0}) {
    fail("{} is damaged; use another run directory", shown(path.string(), 300));
  }
  return size;
}

void write_verified(const std::filesystem::path& run_dir, Bytes size) {
  replace_file(run_dir / kVerifiedName, fmt::format("{}\n", size.n));
}

void remove_verified(const std::filesystem::path& run_dir) { remove_file(run_dir, kVerifiedName); }

RunState run_state(const std::filesystem::path& run_dir) {
  std::error_code none;
  const std::filesystem::path partial = run_dir / kPartialName;
  const bool has_partial = std::filesystem::exists(std::filesystem::symlink_status(partial, none));
  const auto publication = read_publication(run_dir);
  if (!has_partial) {
    return publication ? RunState::finished : RunState::fresh;
  }
  if (publication && same_bytes(partial, publication->output)) {
    std::filesystem::remove(partial);
    sync_directory(run_dir);
    return RunState::finished;
  }
  return RunState::unfinished;
}

}  // namespace poise
