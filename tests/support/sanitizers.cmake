# The compiler of the builds with sanitizers: clang, which compiles such code in half of g++'s time. Where there is none,
# CMake takes its default.
find_program(POISE_CLANG NAMES clang++-16 clang++-17 clang++-18 clang++-19 clang++)
if(POISE_CLANG)
  set(CMAKE_CXX_COMPILER ${POISE_CLANG})
endif()
