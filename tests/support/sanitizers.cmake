# The compiler and the linker of the builds with sanitizers: clang, which compiles such code in half of g++'s time, and lld.
# Where there is none, CMake takes its default.
find_program(POISE_CLANG NAMES clang++-16 clang++-17 clang++-18 clang++-19 clang++)
if(POISE_CLANG)
  set(CMAKE_CXX_COMPILER ${POISE_CLANG})
  # These programs are large: lld links them in a quarter of the time.
  find_program(POISE_LLD NAMES ld.lld-16 ld.lld-17 ld.lld-18 ld.lld-19 ld.lld)
  if(POISE_LLD)
    set(CMAKE_EXE_LINKER_FLAGS_INIT --ld-path=${POISE_LLD})
  endif()
endif()
