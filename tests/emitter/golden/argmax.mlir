// castiron emit --kernel argmax --shape 512 --isa avx2 --threads 2
// 110 lines, sha256 091363353991284e63911b8e7b4b937095b6ee4b27bcdec92ec3e87484dce443
        %15:8 = scf.for %6 = %1 to %5 step %c4 iter_args(%7 = %c3, %8 = %c3, %9 = %c3, %10 = %c3, %11 = %c3, %12 = %c3, %13 = %c3, %14 = %c3) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
          %16 = arith.addi %6, %c5 : index
          %17 = arith.addi %6, %c6 : index
          %18 = arith.addi %6, %c7 : index
          %19 = arith.addi %6, %c8 : index
          %20 = arith.addi %6, %c9 : index
          %21 = arith.addi %6, %c10 : index
          %22 = arith.addi %6, %c11 : index
          %23 = vector.load %m0[%6] : memref<512xf32>, vector<8xf32>
          %24 = arith.cmpf ogt, %23, %7 : vector<8xf32>
          %25 = arith.select %24, %23, %7 : vector<8xi1>, vector<8xf32>
          %26 = vector.load %m0[%16] : memref<512xf32>, vector<8xf32>
          %27 = arith.cmpf ogt, %26, %8 : vector<8xf32>
          %28 = arith.select %27, %26, %8 : vector<8xi1>, vector<8xf32>
          %29 = vector.load %m0[%17] : memref<512xf32>, vector<8xf32>
          %30 = arith.cmpf ogt, %29, %9 : vector<8xf32>
          %31 = arith.select %30, %29, %9 : vector<8xi1>, vector<8xf32>
          %32 = vector.load %m0[%18] : memref<512xf32>, vector<8xf32>
          %33 = arith.cmpf ogt, %32, %10 : vector<8xf32>
          %34 = arith.select %33, %32, %10 : vector<8xi1>, vector<8xf32>
          %35 = vector.load %m0[%19] : memref<512xf32>, vector<8xf32>
          %36 = arith.cmpf ogt, %35, %11 : vector<8xf32>
          %37 = arith.select %36, %35, %11 : vector<8xi1>, vector<8xf32>
          %38 = vector.load %m0[%20] : memref<512xf32>, vector<8xf32>
          %39 = arith.cmpf ogt, %38, %12 : vector<8xf32>
          %40 = arith.select %39, %38, %12 : vector<8xi1>, vector<8xf32>
          %41 = vector.load %m0[%21] : memref<512xf32>, vector<8xf32>
          %42 = arith.cmpf ogt, %41, %13 : vector<8xf32>
          %43 = arith.select %42, %41, %13 : vector<8xi1>, vector<8xf32>
          %44 = vector.load %m0[%22] : memref<512xf32>, vector<8xf32>
          %45 = arith.cmpf ogt, %44, %14 : vector<8xf32>
          %46 = arith.select %45, %44, %14 : vector<8xi1>, vector<8xf32>
          scf.yield %25, %28, %31, %34, %37, %40, %43, %46 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
        }
