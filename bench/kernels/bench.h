#pragma once
// What the kernel benches share: this machine's ceilings, a stopwatch that reports the best of
// many runs, and one line per measurement with the ceiling beside it.

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/shared_memory.h"
#include "kernels/cpu/kernels_cpu.h"

namespace poise::bench {

// Measured on this machine with the pool's threads, for the active instruction set.
struct Ceilings {
  double flops;       // fused multiply-adds from registers, as 2 operations
  double read_bytes;  // a second, summing memory too large for any cache
  double copy_bytes;  // a second, memcpy of such memory: bytes copied, each read and written
};
Ceilings measure_ceilings(cpu::Workers& workers);

// Memory as loaders make it for weights and blocks: a segment in /dev/shm, of huge pages where the machine gives them.
class LoadersMemory {
 public:
  explicit LoadersMemory(std::int64_t bytes);
  ~LoadersMemory() { unlink_segment(segment_.name()); }
  std::byte* data() const { return segment_.data(); }

 private:
  Segment segment_;
};

// Seconds on the clock that `use_clock_of` chose: of the wall, or, for one thread, of its own time
// on a core, which others on a busy machine do not lengthen.
double now();
void use_clock_of(int threads);

// Seconds of the fastest of many runs: the machine's speed without other work.
template <typename Fn>
double best_seconds(Fn fn, double for_seconds = 0.4) {
  fn();
  double best = 1e30;
  const double start = now();
  do {
    const double before = now();
    fn();
    best = std::min(best, now() - before);
  } while (now() - start < for_seconds);
  return best;
}

// Bytes a second that these workers read of such memory, each byte once. Of some machines one part is faster than another.
double read_speed(const std::byte* data, std::int64_t bytes, cpu::Workers& workers,
                  double for_seconds = 0.4);

// "name  time  rate unit  share of the ceiling"
void print_flops(const std::string& name, double seconds, double flops, const Ceilings& ceilings);
void print_bytes(const std::string& name, double seconds, double bytes, double ceiling);

void bench_gemm(cpu::Workers& workers, const Ceilings& ceilings);
void bench_attention(cpu::Workers& workers, const Ceilings& ceilings);
void bench_host_attention(cpu::Workers& workers, const Ceilings& ceilings);
void bench_absorbed_attention(cpu::Workers& workers, const Ceilings& ceilings);
void bench_rows(cpu::Workers& workers, const Ceilings& ceilings);
void bench_sample_tokens(cpu::Workers& workers, const Ceilings& ceilings);
void bench_workers(cpu::Workers& workers, const Ceilings& ceilings);
void bench_segment(cpu::Workers& workers, const Ceilings& ceilings);  // in one thread, by the wall's clock
void bench_segment(cpu::Workers& workers, const Ceilings& ceilings);  // one thread

}  // namespace poise::bench
