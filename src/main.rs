//! The `kvatlas` command: parse, load, start, run, drain, exit.

mod cli;

use std::io::ErrorKind;
use std::process::ExitCode;

use clap::Parser;
use kvatlas_config::Config;
use kvatlas_daemon::Daemon;
use tokio::runtime::{Builder, Runtime};

use cli::{Cli, Command, ConfigSource, ExitStatus, Failure, ServeArguments, StopSignals, supervisor};

fn main() -> ExitCode {
    kvatlas_telemetry::set_commit(env!("BUILD_COMMIT"));
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(refusal) => return end_parsing(&refusal),
    };
    let outcome = match cli.command {
        Command::Serve(arguments) => serve(*arguments),
        #[cfg(feature = "bridge")]
        Command::Up(arguments) => run(arguments.run()),
        #[cfg(feature = "bridge")]
        Command::Bridge(arguments) => run(arguments.run()),
        Command::Query(arguments) => run(cli::query(*arguments)),
        Command::Status(arguments) => run(cli::status(arguments)),
        #[cfg(feature = "top")]
        Command::Top(arguments) => run(cli::top(arguments)),
        Command::Doctor(arguments) => run(cli::doctor(*arguments)),
        Command::Explain(arguments) => cli::explain(&arguments),
        Command::Publish(arguments) => run(cli::publish(&arguments)),
        Command::Demo(arguments) => run(arguments.run()),
        Command::Replay(arguments) => run(arguments.run()),
        Command::Fleet(arguments) => run(arguments.run()),
        #[cfg(feature = "compare")]
        Command::Compare(arguments) => cli::compare(&arguments),
        Command::Admin(arguments) => run(arguments.run()),
        Command::Snapshot(arguments) => cli::snapshot(&arguments),
        #[cfg(feature = "vocab")]
        Command::Vocab(arguments) => cli::vocab(&arguments),
        Command::Probe(arguments) => run(arguments.run()),
        #[cfg(feature = "generate")]
        Command::Completions(arguments) => cli::completions(&arguments),
        #[cfg(feature = "generate")]
        Command::Man(arguments) => cli::man(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            cli::say(format_args!("error: {failure}\n"));
            failure.status.into()
        }
    }
}

/// Prints the help that was asked for, or the mistake in the command line. Returns the exit status.
fn end_parsing(refusal: &clap::Error) -> ExitCode {
    match (refusal.use_stderr(), refusal.print()) {
        (true, _) => ExitStatus::Usage.into(),
        // A closed terminal is no reason to fail.
        (false, Err(error)) if error.kind() != ErrorKind::BrokenPipe => ExitStatus::Failed.into(),
        (false, _) => ExitCode::SUCCESS,
    }
}

fn runtime() -> Result<Runtime, Failure> {
    let runtime = Builder::new_multi_thread().enable_all().build();
    runtime.map_err(|error| Failure::failed(format_args!("cannot start the threads of the runtime: {error}")))
}

/// Runs a command to its end on a new runtime.
fn run(command: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    runtime()?.block_on(command)
}

/// Runs the daemon: loads the configuration, starts the log, and lives until the daemon has stopped.
fn serve(arguments: ServeArguments) -> Result<(), Failure> {
    let Some((config, source)) = arguments.load()? else {
        return Ok(());
    };
    cli::start_logging(&config.logging)?;
    let runtime = runtime()?;
    let outcome = runtime.block_on(live(config, &source));
    // Whatever still runs has overrun the drain's bound already.
    runtime.shutdown_background();
    outcome
}

/// Starts the daemon, waits for a signal or the command `drain`, and then drains the daemon. A second signal ends the process at
/// once.
async fn live(config: Config, source: &ConfigSource) -> Result<(), Failure> {
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        commit = kvatlas_telemetry::commit(),
        "kvatlas starts"
    );
    let mut signals = StopSignals::listen()?;
    let mut hangups = cli::Hangups::listen()?;
    let daemon = tokio::select! {
        started = Daemon::start(config) => started?,
        signal = signals.next() => {
            tracing::info!(signal, "stopped before the start was done");
            return Ok(());
        }
    };
    cli::announce(&daemon);
    tokio::spawn(supervisor::keep_watchdog());
    let announce_ready = async {
        daemon.ready().await;
        tracing::info!("ready");
        supervisor::ready();
        std::future::pending::<()>().await;
    };
    let signal = tokio::select! {
        () = announce_ready => return Ok(()),
        () = source.reload_at(&mut hangups, &daemon) => "SIGHUP",
        signal = signals.next() => signal,
        () = daemon.told_to_stop() => "kvatlas admin drain",
    };
    tracing::info!(signal, "draining; another signal ends the process at once");
    supervisor::stopping();
    tokio::select! {
        report = daemon.stop() => {
            if !report.overran.is_empty() {
                return Err(Failure::failed(report));
            }
            tracing::info!("stopped");
            Ok(())
        }
        signal = signals.next() => {
            tracing::warn!(signal, "ending at once; what was in flight is lost");
            // Without unwinding: threads that do not drain would be waited for.
            std::process::exit(ExitStatus::Failed as i32)
        }
    }
}
