"""Tests of numerical code on several ranks, as its authors write them: they compute far more than they wait."""

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

SIZE = 384


class SolverTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def start(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        factor = torch.randn(SIZE, SIZE, dtype=torch.float64)
        matrix = factor @ factor.T + SIZE * torch.eye(SIZE, dtype=torch.float64)
        rows = matrix.chunk(self.world_size)[self.rank]
        return matrix, rows, torch.randn(SIZE, dtype=torch.float64)

    def times(self, rows, vector):
        parts = [torch.empty(len(rows), dtype=rows.dtype) for _ in range(self.world_size)]
        dist.all_gather(parts, rows @ vector)
        return torch.cat(parts)

    def test_conjugate_gradients(self):
        matrix, rows, b = self.start()
        x, residual = torch.zeros_like(b), b.clone()
        direction = residual.clone()
        for _ in range(100):
            image = self.times(rows, direction)
            step = residual.dot(residual) / direction.dot(image)
            x += step * direction
            smaller = residual - step * image
            direction = smaller + (smaller.dot(smaller) / residual.dot(residual)) * direction
            residual = smaller
        self.assertEqual(matrix @ x, b, atol=1e-6, rtol=1e-6)

    def test_power_iteration(self):
        matrix, rows, vector = self.start()
        for _ in range(300):
            vector = self.times(rows, vector)
            vector /= vector.norm()
        largest = torch.linalg.eigvalsh(matrix)[-1]
        self.assertEqual(vector.dot(self.times(rows, vector)), largest, atol=0, rtol=1e-3)

    def test_products(self):
        matrix, rows, _ = self.start()
        mine, whole = rows, matrix
        for _ in range(20):
            parts = [torch.empty_like(mine) for _ in range(self.world_size)]
            dist.all_gather(parts, mine @ matrix / matrix.norm())
            mine, whole = parts[self.rank], whole @ matrix / matrix.norm()
        self.assertEqual(mine, whole.chunk(self.world_size)[self.rank])

    def test_least_squares(self):
        matrix, rows, b = self.start()
        part = b.chunk(self.world_size)[self.rank]
        squares, image = rows.T @ rows, rows.T @ part
        dist.all_reduce(squares)
        dist.all_reduce(image)
        self.assertEqual(torch.linalg.solve(squares, image), torch.linalg.solve(matrix, b), atol=1e-5, rtol=1e-5)

    def test_monte_carlo(self):
        self.start()
        generator = torch.Generator().manual_seed(self.rank)
        inside = torch.zeros(1, dtype=torch.int64)
        for _ in range(20):
            points = torch.rand(200_000, 2, generator=generator)
            inside += (points.square().sum(1) < 1).sum()
        dist.all_reduce(inside)
        self.assertEqual(4 * inside.item() / (self.world_size * 4_000_000), torch.pi, atol=0.01, rtol=0)

    def test_singular_values(self):
        matrix, rows, _ = self.start()
        squares = rows.T @ rows
        dist.all_reduce(squares)
        for _ in range(4):
            values = torch.linalg.eigvalsh(squares).sqrt()
        self.assertEqual(values.flip(0), torch.linalg.svdvals(matrix), atol=1e-6, rtol=1e-6)


if __name__ == "__main__":
    run_tests()
