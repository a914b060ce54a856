// SPDX-License-Identifier: Apache-2.0
// Every combination of the exactness matrix: {attention, recurrent, both} x {F32, BF16} x {1, 2 threads} x chunks x company x
// lanes and pools x preemption x reuse x {eager, shapes}, against bits computed token by token on one thread.
#include <gtest/gtest.h>

#include "tests/engine/exactness_matrix.h"

namespace rubato::engine {
namespace {

class ExactnessMatrix : public testing::TestWithParam<MatrixCase> {};

TEST_P(ExactnessMatrix, every_way_gives_the_bits_of_token_by_token) {
  test::MatrixDevice one_thread = make_cpu_matrix_device(GetParam(), 1);
  Result<ExactnessChecker> first = ExactnessChecker::make(one_thread.target);
  ASSERT_TRUE(first) << first.error().message;
  const Result<ExactnessReference> reference = first->reference();
  ASSERT_TRUE(reference) << reference.error().message;
  test::expect_exact(*first, *reference, test::whole_matrix());

  test::MatrixDevice two_threads = make_cpu_matrix_device(GetParam(), 2);
  Result<ExactnessChecker> second = ExactnessChecker::make(two_threads.target);
  ASSERT_TRUE(second) << second.error().message;
  test::expect_exact(*second, *reference, test::whole_matrix());
}

INSTANTIATE_TEST_SUITE_P(Models, ExactnessMatrix, testing::ValuesIn(matrix_cases()), matrix_name);

}  // namespace
}  // namespace rubato::engine
