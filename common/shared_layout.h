#pragma once
// The layout of the three shared segments, and which process writes each field. Everything else that
// passes between processes is a message (common/messages.fbs). There is no pointer, lock or condition
// here: only single-writer fields, acquire/release atomics, offsets and ids.
//
//   /poise-UID-RUN-control   one page      ControlSegment below
//   /poise-UID-RUN-weights   sealed, read-only for all but the loader: common/weight_layout.h
//   /poise-UID-RUN-blocks-E  one for each pool epoch E: common/blocks.h; the executor reads and writes
//                            blocks it has orders for
//
// Attached processes hold flock(LOCK_SH) on the control segment's descriptor, so the kernel keeps the
// attach count: if LOCK_EX can be taken, no living process is attached and the name may be removed.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/blocks.h"
#include "common/dtype.h"
#include "common/model_shape.h"

namespace poise {

inline constexpr std::uint64_t kControlMagic = 0x4553494f50ull;  // "POISE"
// One more for each change of what lies here, in ModelShape, in PoolPartition or in blocks and weights: a
// field added, moved or with another meaning. launch/supervisor/lifecycle/segments.py reads the same words,
// and has the same number.
inline constexpr std::uint32_t kAbiVersion = 7;

enum class LoaderState : std::uint32_t {
  creating = 0,  // nothing but magic, ABI and layout hash may be trusted
  loading = 1,   // shape, dtype and sizes are valid; weights arrive
  sealed = 2,    // weights are complete and do not change any more
  draining = 3,  // the loader is ending; no process may attach
};

enum class Process : std::uint32_t { loader = 0, planner = 1, gpu_executor = 2 };
inline constexpr int kProcesses = 3;

// Shows that the work loop is alive, not just a socket: its owner increments it at every step that
// made progress.
struct alignas(64) ProgressWord {
  std::atomic<std::uint64_t> steps;
};

// Offset   field
//      0 | magic, ABI version, layout hash          written before the name is published
//     64 | run id                                   loader, with magic and layout hash
//     96 | model fingerprint                        loader, before `sealed`
//    128 | ModelShape, dtype                         loader, before `loading`
//   2048 | loader state, epochs, released layers     loader
//   2112 | pool: epoch, partition, newest, format,   loader, at a planner's request
//        |   spare and standing bytes
//   2176 | progress words, one cache line each       their owners
struct ControlSegment {
  std::uint64_t magic;
  std::uint32_t abi_version;
  std::uint32_t control_bytes;  // sizeof(ControlSegment) of the writer
  std::uint64_t layout_hash;    // WeightLayout::hash(); covers shape and dtype, too
  std::uint8_t unused0[40];

  char run_id[32];               // lower-case hex, NUL-terminated
  std::uint8_t fingerprint[32];  // SHA-256 over config and the weights' bytes; zero until sealed

  alignas(128) ModelShape shape;
  DType dtype;
  std::uint32_t block_tokens;
  std::uint64_t weights_bytes;  // size of the weights segment

  alignas(2048) std::atomic<std::uint32_t> loader_state;  // LoaderState
  // One more each time a loader takes this segment over, once that one answers.
  std::atomic<std::uint32_t> loader_epoch;
  std::atomic<std::uint64_t> loaded_bytes;       // for the progress line
  std::atomic<std::uint64_t> fingerprint_ready;  // 1 once `fingerprint` is final
  // Number of decoder layers whose weights were removed from the segment because a device holds them:
  // those of is_resident (common/device_memory.h) for this number. Their pages are holes.
  std::atomic<std::uint32_t> released_layers;

  alignas(
      64) std::atomic<std::uint64_t> pool_epoch;  // 0: no pool; released after `pool` is written
  PoolPartition pool;
  std::uint64_t newest_pool_epoch;  // of all pools of this run; noted before such a pool is made
  KvFormat kv_format;               // of the pool's KV blocks
  // Of an earlier pool whose memory the loader keeps for the next one: it is not free, but the next pool has it.
  std::atomic<std::uint64_t> spare_pool_bytes;
  // Bytes at each end of each layer's region whose memory is there; region_bytes for all of it. A block that lies
  // within them may be used.
  std::atomic<std::uint64_t> pool_standing;

  ProgressWord progress[kProcesses];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(offsetof(ControlSegment, run_id) == 64 && offsetof(ControlSegment, shape) == 128);
static_assert(offsetof(ControlSegment, loader_state) == 2048 &&
              offsetof(ControlSegment, pool_epoch) == 2112);
static_assert(offsetof(ControlSegment, released_layers) == 2072);
static_assert(offsetof(ControlSegment, progress) == 2176);
static_assert(sizeof(ControlSegment) == 4096 && std::is_standard_layout_v<ControlSegment>);

}  // namespace poise
