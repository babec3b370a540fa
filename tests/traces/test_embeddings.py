import numpy as np
import pytest

from ground.errors import InputError
from traces.embeddings import STRONG, Basis, best_step, fit
from traces.statistics import routing
from traces.statistics.embedding_price import Keyed, choose_basis, mean_recall, price
from traces.statistics.recall import recall, vote, vote_recall


def made_states(rows=600, layers=3, hidden=48, seed=0):
    """States with a common part and a few directions that matter, and the experts that these decide."""
    random = np.random.default_rng(seed)
    inner = random.standard_normal((rows, 6))
    mix = np.random.default_rng(1).standard_normal((layers + 1, 6, hidden))
    noise = 0.2 * random.standard_normal((rows, layers + 1, hidden))
    states = 3 * np.random.default_rng(2).standard_normal(hidden) + np.einsum("ni,lih->nlh", inner, mix) + noise
    routers = np.random.default_rng(3).standard_normal((layers, 6, 8))
    routes = np.argsort(-np.einsum("ni,lie->nle", inner, routers), axis=2)[:, :, :2].astype(np.int16)
    return states.astype(np.float32), routes


def keyed(rows=600):
    states, routes = made_states(rows)
    return Keyed(states, routes, np.arange(rows) >= rows * 7 // 10)


@pytest.mark.parametrize(("limit", "step"), [(1, 1.2240), (3, 0.6508), (7, 0.3534)])
def test_the_step_is_the_one_known_to_be_best(limit, step):
    assert best_step(limit) == pytest.approx(step, abs=2e-3)


def test_the_step_is_best_on_drawn_numbers_too():
    drawn = np.random.default_rng(0).standard_normal(200_000)

    def error(step):
        return np.mean((drawn - step * np.clip(np.rint(drawn / step), -3, 3)) ** 2)

    assert error(best_step(3)) < min(error(0.55), error(0.75))


def test_stored_integers_times_scale_are_near_the_projected_states():
    states, _ = made_states()
    basis = fit([states], dims=24, bits=6)
    stored = basis.quantise(states)
    assert stored.dtype == np.int8 and stored.shape == (600, 4, 24)
    projected = states @ basis.vectors
    error = np.abs(stored * basis.scale[:, None] - projected)
    inside = np.abs(projected / basis.scale[:, None]) < basis.limits
    assert inside.mean() > 0.95
    assert (error <= 0.501 * basis.scale[:, None])[inside].all()


def test_few_bits_bound_every_dimension_but_the_strong_ones():
    states, _ = made_states()
    stored = fit([states], dims=24, bits=2).quantise(states)
    assert np.abs(stored[:, :, STRONG:]).max() == 1
    assert np.abs(stored[:, :, :STRONG]).max() > 1


def test_cosines_survive_the_projection():
    states, _ = made_states()
    basis = fit([states], dims=24, bits=8)
    assert basis.vectors.T @ basis.vectors == pytest.approx(np.eye(24), abs=1e-5)
    one = states[:100, 1]
    full, kept = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (one, basis.quantise(one, 1).astype(float)))
    assert np.abs(full @ full.T - kept @ kept.T).max() < 0.1


def test_the_basis_is_a_function_of_states_and_seed():
    states, _ = made_states()
    one = fit([states], 24, 3, seed=5)
    assert fit([states], 24, 3, seed=5).sha256 == one.sha256
    assert len({one.sha256, fit([states], 24, 3, seed=6).sha256, fit([states], 24, 4, seed=5).sha256}) == 3


def test_a_basis_comes_back_from_its_file(tmp_path):
    states, _ = made_states()
    basis = fit([states], 24, 3)
    basis.save(tmp_path / "basis.npz")
    again = Basis.load(tmp_path / "basis.npz")
    assert again.sha256 == basis.sha256
    assert (again.quantise(states) == basis.quantise(states)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, "a basis holds vectors, scale and bits"),
        ({"bits": np.int32(9)}, "bits 9"),
        ({"scale": np.array([1, np.nan, 1, 1])}, "finite"),
        ({"scale": np.zeros(4)}, "above 0"),
    ],
)
def test_a_broken_basis_is_refused(tmp_path, change, message):
    states, _ = made_states()
    basis = fit([states], 24, 3)
    arrays = {"vectors": basis.vectors, "scale": basis.scale, "bits": np.int32(3)} | change
    np.savez(tmp_path / "basis.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(InputError, match=message):
        Basis.load(tmp_path / "basis.npz")


@pytest.mark.parametrize(("dims", "bits"), [(1, 3), (49, 3), (24, 1), (24, 9)])
def test_impossible_sizes_are_refused(dims, bits):
    with pytest.raises(InputError, match=r"dims lie in 2\.\.48, bits in 2\.\.8"):
        fit([made_states()[0]], dims, bits)


def test_a_state_that_is_not_finite_is_refused():
    states, _ = made_states()
    states[3, 1, 2] = np.nan
    with pytest.raises(InputError, match="not finite"):
        fit([states], 24, 3)


def test_a_level_of_zeros_is_stored_as_zeros():
    states, _ = made_states()
    states[:, 2] = 0
    assert not fit([states], 24, 3).quantise(states)[:, 2].any()


def test_the_vote_weighs_by_similarity_and_finds_the_experts():
    keys = np.array([[1, 0], [0.9, 0.1], [0, 1]], np.float32)
    routes = np.array([[0, 1], [0, 2], [3, 4]], np.int16)
    assert vote(keys, routes, np.array([[1, 0]], np.float32), 8).tolist() == [[0, 1]]
    # With three keys all of them vote, the far one with no weight.
    assert vote_recall(keys, routes, keys[:1], routes[:1], 8) == 1.0


def test_zero_vectors_and_missing_experts_make_no_nan():
    keys = np.zeros((2, 4), np.float32)
    routes = np.array([[1, -1], [1, 2]], np.int16)
    assert vote(keys, routes, keys, 4).shape == (2, 2)
    assert recall(np.array([[1, 0]]), np.array([[1, -1]])) == 1.0


def test_storing_costs_little_recall_and_more_bits_cost_less():
    domain = keyed()
    full = mean_recall([domain], 8)
    assert full > 0.6  # 0.25 by chance
    prices = [
        price([domain], fit([domain.states[~domain.is_eval]], dims, bits), 8, full) for dims, bits in ((4, 2), (24, 4))
    ]
    assert prices[1].loss < 0.02 < prices[0].loss
    assert prices[0].deflate_bytes < prices[1].deflate_bytes <= 24 * 1.1


def test_the_automatic_choice_suffices_and_a_given_basis_is_kept():
    domain = keyed()
    basis, about = choose_basis([domain], 8, (24, 4), None, 0)
    assert about["recall_full"] - about["recall_stored"] < 0.02
    assert (about["dims"], about["bits"], about["basis_sha256"]) == (24, 4, basis.sha256)
    again, _ = choose_basis([domain], 8, (8, 2), basis, 0)
    assert again is basis
    automatic, about = choose_basis([domain], 8, None, None, 0)
    assert automatic.dims <= 48 and about["recall_full"] - about["recall_stored"] < 0.05


def test_a_basis_of_another_model_is_refused():
    basis, _ = choose_basis([keyed()], 8, (24, 4), None, 0)
    states, routes = made_states(layers=2)
    with pytest.raises(InputError, match="basis is for 48 hidden units and 4 levels"):
        choose_basis([Keyed(states, routes, np.arange(600) > 400)], 8, None, basis, 0)


@pytest.mark.parametrize("wanted", [(16, 3), None])
@pytest.mark.parametrize("mixed", [(), (0,), (1,)])
def test_tensors_give_what_arrays_do(mixed, wanted):
    """States on a GPU are tensors of the model's precision; here of a CPU, so that the comparison is close.

    Where a GPU has no more room, those of other domains (``mixed``) are arrays.
    """
    torch = pytest.importorskip("torch")
    arrays = []
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        states = torch.from_numpy(rng.standard_normal((400, 4, 48)) * np.linspace(0.2, 3, 48)).to(torch.bfloat16)
        states[3, 2] = 0
        routes = np.stack([rng.permutation(16)[:3] for _ in range(400 * 3)]).reshape(400, 3, 3).astype(np.int16)
        arrays.append(Keyed(states, routes, np.arange(400) >= 280))
    hosted = [Keyed(one.states.float().numpy(), one.routes, one.is_eval) for one in arrays]
    arrays = [hosted[i] if i in mixed else one for i, one in enumerate(arrays)]
    (basis, about), (same, said) = (choose_basis(domains, 16, wanted, None, 0) for domains in (hosted, arrays))
    assert (about["dims"], about["bits"]) == (said["dims"], said["bits"])
    for name in ("recall_full", "recall_stored", "deflate_bytes", "lzma_bytes"):
        assert about[name] == pytest.approx(said[name], rel=0.02), name
    assert np.abs(basis.scale / same.scale - 1).max() < 1e-5
    for level in (None, 2):
        one, other = (
            basis.quantise(d[0].states if level is None else d[0].states[:, 2], level) for d in (hosted, arrays)
        )
        assert other.dtype == np.int8 and (one != other).mean() < 1e-3
    both = [
        routing.statistics({"x": d[0], "y": d[1]}, {"x": d[0].routes, "y": d[1].routes}, 16) for d in (hosted, arrays)
    ]
    assert both[0]["adjacent_layer_cosine"] == pytest.approx(both[1]["adjacent_layer_cosine"], abs=2e-4)
    for name in ("x", "y"):
        assert both[0]["neighbour_recall"][name] == pytest.approx(both[1]["neighbour_recall"][name], abs=0.01)
