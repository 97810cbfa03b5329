#pragma once
// The files of a run directory that show how far the run came. A run is unfinished while its partial results are there, and finished once they
// have gone to the output. Free functions; one process at a time (run.lock).

#include <filesystem>
#include <optional>

#include "common/units.h"

namespace poise {

inline constexpr const char* kPartialName = "results.jsonl.partial";
inline constexpr const char* kPublishedName = "results.jsonl.published";
inline constexpr const char* kVerifiedName = "results.jsonl.verified";
inline constexpr const char* kOrdersName = "orders.log";  // common/order_log.h

enum class RunState {
  fresh,       // nothing to resume
  unfinished,  // --resume goes on
  finished,    // the output was written, whole
};
// Also completes what a crash left: partial results whose copy is already the output are removed.
RunState run_state(const std::filesystem::path& run_dir);

// Where the results go, noted before they go there.
struct Publication {
  std::filesystem::path output;  // absolute
  Bytes size;
};
std::optional<Publication> read_publication(const std::filesystem::path& run_dir);
void write_publication(const std::filesystem::path& run_dir, const Publication& publication);
void remove_publication(const std::filesystem::path& run_dir);  // nothing where there is none

// With `--verify`: how many bytes of the partial results come from weights that were found sound after them. Nothing where the
// run does not verify.
std::optional<Bytes> read_verified(const std::filesystem::path& run_dir);
void write_verified(const std::filesystem::path& run_dir, Bytes size);
void remove_verified(const std::filesystem::path& run_dir);  // nothing where there is none

// True if both are regular files with the same bytes.
bool same_bytes(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace poise
