"""Write ten rows in verl's form, as `vapo train --task rows.parquet` and verl take them.

python examples/ten_rows.py rows.parquet
"""

import sys

import pyarrow
import pyarrow.parquet


def main(path: str) -> None:
    """Write the rows."""
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {n} + {2 * n}? Put the answer in \\boxed{{}}."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(3 * n)},
            "extra_info": {"index": n},
        }
        for n in range(1, 11)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


if __name__ == "__main__":
    main(sys.argv[1])
