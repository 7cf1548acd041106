#!/bin/bash
# Trains on one or several SLURM nodes, and requeues itself at its time limit until the run is finished:
#
#     sbatch --nodes=2 examples/slurm.sh --save-dir /shared/runs/first --epochs 40
#
# Submit the script from the repository. All nodes must have access to the repository, --save-dir and the data. The
# script needs --save-dir, and takes all arguments of main_multi_gpu.py but --fresh: the same arguments resume the run.
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
# How the job stops, 120 s before the time limit:
#   SLURM sends USR1 to this shell only (B:). The shell forwards USR1 to srun, and srun to every node. It cannot forward
#   TERM, which srun turns into SIGKILL. On each node a second shell sends TERM to the training processes, but not to
#   torchrun, which kills its workers 30 s after TERM even if they have not saved, and which USR1 would end. (torch 2.13
#   has --signals-to-handle and --shutdown-timeout for this purpose, but the script also supports torch 2.8.)
#   The workers stop together, save, and return 0, and torchrun and srun return 0, too.
#
# A node that fails leaves the run's lock in --save-dir. SLURM then requeues the job, which takes over the lock once it
# has not been renewed for 60 s.

set -u

save_dir=
previous=
for argument in "$@"; do
    case $argument in
        --save-dir=* | --save_dir=*) save_dir=${argument#*=} ;;
        *) case $previous in --save-dir | --save_dir) save_dir=$argument ;; esac ;;
    esac
    previous=$argument
done
save_dir=${save_dir/#"~/"/"$HOME/"} # as the program reads --save-dir=~/run
if [ -z "$save_dir" ]; then
    echo "error: --save-dir DIR: missing, but this script needs it to queue the job again; add it to the arguments" >&2
    exit 2
fi

# Waits for a child process even if traps interrupt the shell's wait; returns the child's exit status.
wait_for() {
    wait "$1"
    while kill -0 "$1" 2> /dev/null; do wait "$1"; done
    wait "$1" # returns the status, which the shell remembers
}

# Runs torchrun on a node, with one worker per GPU.
train_on_node() {
    # SLURM preempts a job by TERM. Some clusters signal every process of the step, so torchrun must ignore USR1.
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
# Since SLURM 22.05, srun no longer takes --cpus-per-task from the job, and torchrun and its ranks may get one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

asked_to_stop=no
srun --kill-on-bad-exit=1 bash -c 'train_on_node "$@"' train_on_node "$@" &
srun_pid=$!
trap 'asked_to_stop=yes; kill -USR1 "$srun_pid"' USR1
wait_for "$srun_pid"
status=$?

# Requeue only if the run was saved. Without a request to stop, state.json may be from an earlier attempt.
if [ "$asked_to_stop" = yes ]; then
    if grep -qs '"state": "preempted"' "$save_dir/state.json"; then
        echo "Time is up and everything is saved: queueing job $SLURM_JOB_ID again."
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "Not queueing job $SLURM_JOB_ID again: the state in $save_dir/state.json is not \"preempted\"." >&2
    fi
fi
exit "$status"
