# SPDX-License-Identifier: Apache-2.0
# Flags that every target shares, and one function that declares a room.

add_library(rubato_flags INTERFACE)
target_include_directories(rubato_flags INTERFACE ${PROJECT_SOURCE_DIR})
# One rounding per operation as written: contraction may differ between paths.
target_compile_options(rubato_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wno-sign-conversion;-Werror;-ffp-contract=off;-fno-omit-frame-pointer;-g1>")
if(RUBATO_SANITIZE)
  # g++ 12 warns of fences that TSan does not model (Asio's) and of overlaps that instrumented code only seems to have.
  target_compile_options(rubato_flags INTERFACE -fsanitize=${RUBATO_SANITIZE} -fno-sanitize-recover=all -Wno-tsan -Wno-restrict
                                                -Wno-maybe-uninitialized -Wno-array-bounds -Wno-stringop-overflow)
  target_link_options(rubato_flags INTERFACE -fsanitize=${RUBATO_SANITIZE})
endif()
if(RUBATO_FUZZ)
  target_compile_options(rubato_flags INTERFACE -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
                                                -Wno-deprecated-declarations)  # libstdc++'s own, under a newer clang
  target_link_options(rubato_flags INTERFACE -fsanitize=address,undefined)
endif()

# rubato_room(NAME SOURCES file... LINK library...): a static library with the shared flags.
function(rubato_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;LINK;PRIVATE_LINK" ${ARGN})
  if(NOT ROOM_SOURCES)
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE rubato_flags ${ROOM_LINK})
    return()
  endif()
  add_library(${name} STATIC ${ROOM_SOURCES})
  target_link_libraries(${name} PUBLIC rubato_flags ${ROOM_LINK} PRIVATE ${ROOM_PRIVATE_LINK})
endfunction()

# What nearly every test includes, compiled once: parsing it again in each of them would double the build.
function(rubato_test_headers)
  # An executable, because a precompiled header serves only targets that are compiled with the same flags.
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/test_headers.cpp CONTENT "int main() {}\n")
  add_executable(rubato_test_headers ${CMAKE_CURRENT_BINARY_DIR}/test_headers.cpp)
  rubato_test_options(rubato_test_headers)
  target_link_libraries(rubato_test_headers PRIVATE rubato_flags GTest::gmock nlohmann_json::nlohmann_json)
  target_precompile_headers(rubato_test_headers PRIVATE <gmock/gmock.h> <gtest/gtest.h> <nlohmann/json.hpp> <algorithm> <chrono>
                            <functional> <map> <memory> <optional> <random> <string> <thread> <unordered_map> <variant> <vector>)
endfunction()

# Tests check what is computed, not how fast: -O1 halves their compile time.
function(rubato_test_options target)
  target_compile_options(${target} PRIVATE -O1 -g0)
  target_compile_definitions(${target} PRIVATE RUBATO_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
endfunction()

# rubato_tests(ROOM LINK library...): ROOM/*_test.cpp becomes ROOM_tests with label `fast`, ROOM/*_slow.cpp becomes
# ROOM_slow_tests with label `slow`.
function(rubato_tests room)
  cmake_parse_arguments(T "" "" "LINK" ${ARGN})
  file(GLOB fast CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${room}/*_test.cpp)
  file(GLOB slow CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${room}/*_slow.cpp)
  foreach(kind fast slow)
    if(${kind})
      set(target ${room}_tests)
      if(kind STREQUAL "slow")
        set(target ${room}_slow_tests)
      endif()
      add_executable(${target} ${${kind}})
      rubato_test_options(${target})
      target_precompile_headers(${target} REUSE_FROM rubato_test_headers)
      target_link_libraries(${target} PRIVATE rubato_flags ${T_LINK} GTest::gmock GTest::gtest_main nlohmann_json::nlohmann_json)
      gtest_discover_tests(${target} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS ${kind} TIMEOUT 1200)
    endif()
  endforeach()
endfunction()
