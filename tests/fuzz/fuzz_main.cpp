// A program of fuzz targets. libFuzzer's main reads the command line and calls these.

#include "tests/fuzz/fuzzing.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  poise::fuzzing::Target::chosen().run({data, size});
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t most, unsigned seed) {
  return poise::fuzzing::Target::chosen().mutate(data, size, most, seed);
}
