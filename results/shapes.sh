#!/usr/bin/env bash
# The table "Drawn shapes" of the README: about 20 minutes on two cores, a thread a run. Skips what is done; a run that
# was cut short goes on. Results: runs/shapes-*/results.json; kept under results/shapes/.
cd "$(dirname "$0")/.." || exit
export OMP_NUM_THREADS=1

run() {     # NAME flags...
    local out=runs/shapes-$1
    shift
    [ -e "$out/results.json" ] && return
    if [ -e "$out/config.json" ]; then python train.py --resume --out "$out"; else python train.py --out "$out" "$@"; fi
    python eval.py "$out"
}

seed() {    # SEED
    run "hsd-$1" --seed "$1"
    run "none-$1" --init "runs/shapes-hsd-$1" --stability none      # task 1 is the same
    run "co2l-$1" --seed "$1" --plasticity supcon --stability ird
    run "joint-$1" --seed "$1" --tasks 1
}

(seed 0; run hsd-2 --seed 2; run none-2 --init runs/shapes-hsd-2 --stability none) &
(seed 1; run co2l-2 --seed 2 --plasticity supcon --stability ird; run joint-2 --seed 2 --tasks 1) &
wait
for method in hsd none co2l joint; do
    python eval.py runs/shapes-$method-0 runs/shapes-$method-1 runs/shapes-$method-2 | tail -4
done
