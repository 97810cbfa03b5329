# CUDA is used where nvcc is found and never required. The programs then carry the CUDA runtime inside and load cuBLAS by
# themselves, so that one build serves machines with a GPU and without.

set(POISE_HAS_CUDA OFF)
if(NOT POISE_CUDA STREQUAL "OFF")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(POISE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda/bin PATH_SUFFIXES bin)
    if(POISE_NVCC)
      set(CMAKE_CUDA_COMPILER ${POISE_NVCC})
    endif()
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    # Hopper's own code, and PTX from which the driver makes code for any other GPU from Ampere on.
    set(CMAKE_CUDA_ARCHITECTURES 80-virtual 90a-real)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake before 3.25.2 does not know that nvcc can
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    find_package(CUDAToolkit 12.8)
    set(POISE_HAS_CUDA ${CUDAToolkit_FOUND})
  endif()
  if(POISE_HAS_CUDA)
    if(POISE_CUDA STREQUAL "CHECKED")
      # A third of the time; cuda_is_missing() refuses such code. nvcc 12 does not know the option.
      set(POISE_CUDA_OPTIONS "$<$<VERSION_GREATER_EQUAL:${CUDAToolkit_VERSION},13>:--Ofast-compile=max>")
    else()
      # Half the size: a bundle has the kernels three times, in the program and in two programs of tests.
      set(POISE_CUDA_OPTIONS --compress-mode=size)
    endif()
    add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:${POISE_CUDA_OPTIONS}>")
    message(STATUS "CUDA ${CUDAToolkit_VERSION}: the CUDA device is built")
  elseif(POISE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "POISE_CUDA is ON, and no CUDA toolkit from 12.8 on is found: put nvcc on PATH or set CUDACXX")
  else()
    message(STATUS "CUDA is not found (nvcc on PATH, from 12.8 on): only the CPU device is built")
  endif()
endif()

# Sources under FOLDER/cuda/ with all that links to them; nothing where CUDA is not.
function(poise_cuda_library name folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${folder}/cuda/*.cu
       ${CMAKE_SOURCE_DIR}/${folder}/cuda/*.cpp)
  if(NOT POISE_HAS_CUDA OR NOT sources)
    return()
  endif()
  add_library(${name} STATIC ${sources})
  set_target_properties(${name} PROPERTIES UNITY_BUILD OFF)  # few sources, which no build without a GPU could test together
  target_link_libraries(${name} PUBLIC ${ARGN} CUDA::cudart_static PRIVATE ${CMAKE_DL_LIBS})
  target_include_directories(${name} SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
endfunction()
