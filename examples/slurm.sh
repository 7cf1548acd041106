#!/bin/bash
# Trains on one or several SLURM nodes, and queues itself again when its time is up, until the run is finished:
#
#     sbatch --nodes=2 examples/slurm.sh --save-dir /shared/runs/first --epochs 40
#
# Submit it from the repository, which all nodes must see, as they must see --save-dir and the data. The arguments are
# those of main_multi_gpu.py; the same ones go on where the run was, so --fresh does not belong here.
#
#SBATCH --job-name=lockstep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#
# How a request to stop travels, 120 s before the time limit:
#   SLURM sends USR1 to this shell alone (B:). This shell passes it to srun, which passes it to every node. TERM would
#   not do: srun makes a SIGKILL of it. On each node a second shell sends TERM to the training processes. torchrun
#   itself must not notice: it dies of USR1, and on TERM it kills its workers 30 s later, saved or not. (torch 2.13 has
#   --signals-to-handle and --shutdown-timeout for that, but this script is for torch 2.8 too.)
#   The workers stop together, save, and return 0, and so do torchrun and srun.
#
# A node that dies leaves its lock in --save-dir. SLURM then queues the job again by itself, and since it has the same job
# id, and has been started once more, it takes the lock over.

set -u

save_dir=checkpoints/run
previous=
for argument in "$@"; do
    case $argument in
        --save-dir=* | --save_dir=*) save_dir=${argument#*=} ;;
        *) case $previous in --save-dir | --save_dir) save_dir=$argument ;; esac ;;
    esac
    previous=$argument
done

# Waits for a child, whatever traps interrupt the waiting; returns its exit status.
wait_for() {
    wait "$1"
    while kill -0 "$1" 2> /dev/null; do wait "$1"; done
    wait "$1" # which the shell remembers
}

# On each node: torchrun, with one worker per GPU.
train_on_node() {
    # TERM is how SLURM itself preempts a job. Some clusters signal every process of the step: hence ignoring USR1.
    trap 'trap "" USR1; pkill -TERM -P "$torchrun_pid"' USR1 TERM
    (
        trap '' USR1
        exec torchrun --nnodes="$SLURM_JOB_NUM_NODES" --node-rank="$SLURM_NODEID" \
            --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
            main_multi_gpu.py --multi-gpu ddp "$@"
    ) &
    torchrun_pid=$!
    wait_for "$torchrun_pid"
}

export MASTER_ADDR MASTER_PORT
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export -f train_on_node wait_for

asked_to_stop=no
srun --kill-on-bad-exit=1 bash -c 'train_on_node "$@"' train_on_node "$@" &
srun_pid=$!
trap 'asked_to_stop=yes; kill -USR1 "$srun_pid"' USR1
wait_for "$srun_pid"
status=$?

# Only what was saved is worth going on from. Without a request to stop the file may be of an earlier attempt.
if [ "$asked_to_stop" = yes ] && grep -qs '"state": "preempted"' "$save_dir/state.json"; then
    echo "Time is up and everything is saved: queueing job $SLURM_JOB_ID again."
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
