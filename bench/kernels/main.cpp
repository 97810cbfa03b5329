// How fast the CPU kernels are, each beside the ceiling that limits it.
//
//   poise-kernels-bench [threads] [avx512|avx2|portable] [gemm|attention|host|rows|sample|workers|segment ...]
//
// The ceilings stand first; `ceilings` in place of a kernel asks for nothing else.
//
// One thread is timed by its own time on a core, several by the wall: on a busy machine ask for one.

#include <fmt/core.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "bench/kernels/bench.h"
#include "kernels/cpu/isa.h"

int main(int argc, char** argv) {
  using namespace poise;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    bool known = false;
    for (const cpu::Isa isa : cpu::available_isas()) {
      if (argument == cpu::name_of(isa)) {
        cpu::force_isa(isa);
        known = true;
      }
    }
    if (const int number = std::atoi(argv[i]); number > 0) {
      threads = number;
      known = true;
    }
    if (!known) {
      names.push_back(argument);
    }
  }
  bench::use_clock_of(threads);
  cpu::Workers workers(threads);
  const bench::Ceilings ceilings = bench::measure_ceilings(workers);
  fmt::print(
      "{} threads, {}: {:.1f} GFLOP/s from registers, memory {:.1f} GB/s read, {:.1f} "
      "copied\n",
      threads, cpu::name_of(cpu::active_isa()), ceilings.flops * 1e-9, ceilings.read_bytes * 1e-9,
      ceilings.copy_bytes * 1e-9);
  struct Bench {
    const char* name;
    void (*run)(cpu::Workers&, const bench::Ceilings&);
  };
  for (const Bench& one :
       {Bench{"gemm", bench::bench_gemm}, Bench{"attention", bench::bench_attention},
        Bench{"host", bench::bench_host_attention},
        Bench{"absorbed", bench::bench_absorbed_attention}, Bench{"rows", bench::bench_rows},
        Bench{"sample", bench::bench_sample_tokens}, Bench{"workers", bench::bench_workers},
        Bench{"segment", bench::bench_segment}}) {
    bool wanted = names.empty();
    for (const std::string& name : names) {
      wanted = wanted || name == one.name;
    }
    if (wanted) {
      one.run(workers, ceilings);
    }
  }
  return 0;
}
